"""The interface of a route between fields in host memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from mpishare.plans.engine import RoutedSetup
    from mpishare.plans.message import Message

    Array = np.ndarray[Any, Any]


class HostRoute(ABC):
    """The messages of one plan that take one route, in one direction of the exchange.

    Collective to make, host-blocking: memory in common comes from `PlanComm.take_memory`, one piece
    for all ranks, by calls that are collective over all nodes of the plan. The route is complete
    after `lay_out`, which may fail on one rank. `start` must not wait for another rank to come, but
    for one that is an exchange behind, and `wait` ends with all cells in place. Both end within the
    deadline of the node, by `PlanComm.wait` or `coordination.poll`.
    """

    staging_nbytes = 0

    def __init__(self, setup: RoutedSetup) -> None:
        self._setup, self._comm = setup, setup.comm

    @abstractmethod
    def lay_out(self, sends: Sequence[Message], recvs: Sequence[Message]) -> None:
        """Prepare to send and to receive these messages of this rank. Local."""

    @abstractmethod
    def start(self, arrays: Sequence[Array]) -> None:
        """Send the cells of these fields, which are in the dtypes in which cells travel."""

    @abstractmethod
    def wait(self, arrays: Sequence[Array]) -> None:
        """Receive into the same fields; then zero what was sent, where the setup does."""

    @abstractmethod
    def close(self) -> None:
        """Free what the route holds, also after a failed `lay_out`."""

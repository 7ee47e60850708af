"""The interface of a route between fields in host memory, and how NumPy stores cells in them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        self._setup, self._comm, self._adds = setup, setup.comm, setup.adds

    @abstractmethod
    def lay_out(self, sends: Sequence[Message], recvs: Sequence[Message]) -> None:
        """Prepare to send and to receive these messages of this rank. Local."""

    @abstractmethod
    def start(self, arrays: Sequence[Array]) -> None:
        """Send the cells of these fields, which are in the dtypes in which cells travel."""

    @abstractmethod
    def wait(self, arrays: Sequence[Array]) -> None:
        """Receive into the same fields; where the setup adds, then zero what was sent."""

    @abstractmethod
    def close(self) -> None:
        """Free what the route holds, also after a failed `lay_out`."""

    def store(self, array: Array, key: Any, cells: Array) -> None:
        """Overwrite cells with the received ones, or add these."""
        if self._adds:
            add(array, key, cells)
        else:
            array[key] = cells

    def zero(self, sends: Sequence[Message], arrays: Sequence[Array]) -> None:
        """Set the cells that were sent to zero: the end of a call that adds."""
        for message in sends:
            for part in message.parts:
                arrays[part.field][part.key] = 0


def add(array: Array, key: Any, cells: Array) -> None:
    """Add the received cells; where an index occurs twice, both are added, in order."""
    if all(isinstance(item, slice) for item in key):
        target = array[key]
        np.add(target, cells, out=target)
    else:
        np.add.at(array, key, cells)

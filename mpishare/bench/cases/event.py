"""Case ``event``: record and wait, one hop from the owner to all waiters, and there and back.

The baselines are what one writes without events: wait for the GPU, then `MPI_Bcast`, or `MPI_Send`
and `MPI_Recv`, of one word.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.bench.comparison import Comparison, Variant
from mpishare.bench.problems.check import Pattern

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.bench.cases import Case
    from mpishare.bench.report.rows import Row
    from mpishare.bench.session import Session

#: Words that a rank writes by turns. A chain of checked steps is shorter, and ends with an
#: agreement, so that no word is written again before all have read it.
_SLOTS = 8


def run(session: Session, case: Case) -> list[Row]:
    """Run the case and return its rows. Collective, host-blocking."""
    pattern = Pattern(session.node.xp, 1)
    unfit = None
    if min(session.comm.allgather(session.node.size)) < 2:
        unfit = "an event needs two ranks on every node"
    comparison = Comparison(session, case, unfit=unfit)
    hop, pingpong = partial(_Hop, session, pattern), partial(_PingPong, session, pattern)
    comparison.add("hop", partial(hop, _Event), against=("bcast",))
    comparison.add("pingpong", partial(pingpong, _Event), against=("send",))
    comparison.add_baselines("bcast", {"bcast": partial(hop, _Broadcast)})
    comparison.add_baselines("send", {"send": partial(pingpong, _Message)})
    return comparison.run()


class _Event:
    """A signal by an event of the node."""

    def __init__(self, session: Session, owner: int, waiters: list[int] | None) -> None:
        event = session.node.event(owner=owner, waiters=waiters)
        self.send, self.receive, self.close = event.record, event.wait, event.close


class _Broadcast:
    """A signal by MPI to all ranks."""

    def __init__(self, session: Session, owner: int, waiters: list[int] | None) -> None:
        self._synchronize = session.synchronize
        self.receive = self.transfer(session.node.comm, owner, waiters)

    def transfer(self, comm: Any, owner: int, waiters: list[int] | None) -> Callable[[], None]:  # noqa: ARG002
        """Return what receives, and what sends once the GPU is done."""
        self._send = partial(comm.Bcast, np.zeros(1, "u8"), owner)
        return self._send

    def send(self) -> None:
        self._synchronize()
        self._send()

    def close(self) -> None:
        """Do nothing."""

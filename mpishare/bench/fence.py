"""Case ``fence``: the order of all ranks, every rank's work before every rank's next, with no data.

The baseline is what one writes without windows: wait for the GPU, then `MPI_Barrier`.
"""

from __future__ import annotations

from functools import partial

from mpishare.bench.cases import Case
from mpishare.bench.check import Pattern
from mpishare.bench.comparison import Comparison, Variant
from mpishare.bench.session import Call, Session


def run(session: Session, case: Case) -> None:
    comparison, pattern = Comparison(session, case), Pattern(session.node.xp, 1)
    comparison.add("fence", partial(OrderAll, session, pattern))
    if not session.on_cuda:  # where it orders no work on streams
        comparison.add("node.barrier", partial(OrderAll, session, pattern, session.node.barrier))
    after_gpu = session.synchronized(session.node.comm.Barrier)
    comparison.add_baseline("barrier", partial(OrderAll, session, pattern, after_gpu))
    comparison.add_brought(session)
    comparison.run()


class OrderAll(Variant):
    """Order all ranks, by default with a fence; checked by a word of each that all others read.

    The words alternate between two halves of a segment: a half is written again two steps later,
    when its readers have come through the order in between.
    """

    moves = False

    def __init__(self, session: Session, pattern: Pattern, order: Call | None = None) -> None:
        self.node, self.check = session.node, pattern
        self._window = self.node.allocate_each((2, 1), "u8", fill=0)
        self._half = 0
        self.step = self._window.fence if order is None else order

    def fill(self, token: int) -> None:
        self._half = 1 - self._half
        self.check.fill(self._window.array[self._half], self.node.rank, 0, token)

    def verify(self, token: int) -> None:
        for rank in range(self.node.size):
            self.check.verify(self._window.segment(rank)[self._half], rank, 0, token)

    def close(self) -> None:
        self._window.close()

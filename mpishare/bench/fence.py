"""Case ``fence``: the order of all ranks, every rank's work before every rank's next, with no data.

The baseline is what one writes without windows: wait for the GPU, then `MPI_Barrier`. An order is
checked by words that all ranks store into each other's segments of a window.
"""

from __future__ import annotations

from functools import partial

from mpishare.bench.cases import Case
from mpishare.bench.check import Tally, word
from mpishare.bench.comparison import Comparison, Variant
from mpishare.bench.session import Call, Session


def run(session: Session, case: Case) -> None:
    node, comparison = session.node, Comparison(session, case)
    comparison.add("fence", partial(Ordered, session))
    if not session.on_cuda:  # where it orders no work on streams
        comparison.add("node.barrier", partial(Ordered, session, node.barrier))
    after_gpu = session.synchronized(node.comm.Barrier)
    comparison.add_baseline("barrier", partial(Ordered, session, after_gpu))
    comparison.run()


class Ordered(Variant):
    """A call that orders all ranks, by default the fence of the window that checks it.

    A step stores a word into the segment of each rank, calls, and compares what is in mine. The
    words land in two halves in turn: one is written again when its reader has come through the call
    in between.
    """

    moves = False

    def __init__(self, session: Session, order: Call | None = None) -> None:
        self.node, self.check = session.node, Tally(session.node.xp)
        self.window = self.node.allocate_each((2, self.node.size), "u8", fill=0)
        self.step = order or self.window.fence

    def checked_step(self, token: int) -> None:
        node, half = self.node, token % 2
        for rank in range(node.size):
            self.window.segment(rank)[half, node.rank] = word(node.rank, rank, token)
        self.step()
        found = self.window.array[half]
        expected = [word(rank, node.rank, token) for rank in range(node.size)]
        self.check.add((found != node.xp.asarray(expected, "u8")).sum())
        found[...] = 0

    def close(self) -> None:
        self.window.close()

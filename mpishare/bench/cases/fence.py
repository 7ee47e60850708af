"""Case ``fence``: every rank's work before every rank's next.

The baselines are what one writes without windows: wait for the GPU, then `MPI_Barrier`; and, on
CUDA, the same order by bare stream memory operations, every rank to every other in one batch.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mpishare.bench.comparison import Comparison, Variant
from mpishare.bench.problems.check import Pattern

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.bench.cases import Case
    from mpishare.bench.report.rows import Row
    from mpishare.bench.session import Session


def run(session: Session, case: Case) -> list[Row]:
    """Run the case and return its rows. Collective, host-blocking."""
    pattern = Pattern(session.node.xp, 1)
    comparison = Comparison(session, case)
    comparison.add("fence", partial(_Fence, session, pattern))
    comparison.add_baselines("barrier", {"barrier": partial(_Barrier, session, pattern)})
    comparison.add_baselines("counters", {"counters": partial(_Counters, session, pattern)})
    return comparison.run()


class _OrderAll(Variant):
    """Order all ranks; checked by a word of each rank that all others read.

    The words alternate between two halves of a segment: a half is written again two steps later,
    when its readers have come through the order in between.
    """

    moves = False

    def __init__(self, session: Session, pattern: Pattern) -> None:
        self.node = session.node
        self._pattern = pattern
        self._window = self.node.allocate_each((2, 1), "u8", fill=0)
        self._half = 0
        self._order = self.order(session)

    def order(self, session: Session) -> Callable[[], object]:
        """Return what orders all ranks."""
        raise NotImplementedError

    def fill(self, token: int) -> None:
        self._half = 1 - self._half
        self._pattern.fill(self._window.array[self._half], self.node.rank, 0, token)

    def step(self) -> None:
        self._order()

    def verify(self, token: int) -> None:
        for rank in range(self.node.size):
            self._pattern.verify(self._window.segment(rank)[self._half], rank, 0, token)

    def wrong(self) -> int:
        return self._pattern.wrong()

    def close(self) -> None:
        self._window.close()


class _Fence(_OrderAll):
    def order(self, session: Session) -> Callable[[], object]:  # noqa: ARG002
        return self._window.fence


class _Barrier(_OrderAll):
    def order(self, session: Session) -> Callable[[], object]:
        barrier, synchronize = session.node.comm.Barrier, session.synchronize
        if not session.on_cuda:
            return barrier

        def synchronize_and_barrier() -> None:
            synchronize()
            barrier()

        return synchronize_and_barrier


class _Counters(_OrderAll):
    def order(self, session: Session) -> Callable[[], object]:
        from mpishare.bench.baselines.counters import Counters

        self._counters = Counters(session)
        others = [rank for rank in range(self.node.size) if rank != self.node.rank]
        enqueue = self._counters.batch(others, others)
        value = 0

        def write_and_wait() -> None:
            nonlocal value
            value += 1
            enqueue(value)

        return write_and_wait

    def close(self) -> None:
        self._counters.close()
        super().close()

"""Case ``fence``: every rank's work before every rank's next.

The rivals are what one writes without windows: wait for the GPU, then `MPI_Barrier`; and, on CUDA,
the same order by bare stream memory operations, every rank to every other in one batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpishare.bench.arm import Arm, Entry
from mpishare.bench.contest import contest, rivals
from mpishare.bench.pattern import Pattern

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.bench.rows import Row
    from mpishare.bench.session import Session


def run(session: Session) -> list[Row]:
    """Run the case and return its rows. Collective, host-blocking."""
    pattern = Pattern(session.node.xp, 1)

    def counters() -> list[Entry]:
        return [Entry("counters", lambda: _Counters(session, pattern), kind="rival")]

    entries = [
        Entry("fence", lambda: _Fence(session, pattern), against=("barrier", "counters")),
        *rivals(
            session,
            "fence",
            {
                "barrier": lambda: [
                    Entry("barrier", lambda: _Barrier(session, pattern), kind="rival")
                ],
                "counters": counters,
            },
        ),
    ]
    return contest(session, "fence", 0, entries)


class _OrderAll(Arm):
    """Order all ranks; checked by a word of each that all others read.

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

    def count(self, token: int) -> None:
        for rank in range(self.node.size):
            self._pattern.count(self._window.segment(rank)[self._half], rank, 0, token)

    def wrong(self) -> int:
        return self._pattern.wrong()

    def close(self) -> None:
        self._window.close()


class _Fence(_OrderAll):
    def order(self, session: Session) -> Callable[[], object]:  # noqa: ARG002 - it needs none
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
        from mpishare.bench.cases.counters import Counters

        self._counters = Counters(session)
        others = [rank for rank in range(self.node.size) if rank != self.node.rank]
        batch = self._counters.batch(others, others)
        value = 0

        def write_and_wait() -> None:
            nonlocal value
            value += 1
            batch.enqueue(value)

        return write_and_wait

    def close(self) -> None:
        self._counters.close()
        super().close()

"""Cases ``fence`` and ``pairwise``: the order between ranks alone, with no data.

``fence`` orders every rank's work before every rank's next, as does `Node.barrier` on the host;
``pairwise`` has post, start, complete and wait with both neighbors. The baselines are what one
writes without windows: wait for the GPU, then `MPI_Barrier`, or a message of no bytes to both
neighbors; and, on CUDA, the same order by bare stream memory operations, every rank to every other
in one batch, or in the same four batches.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mpishare.bench.comparison import Comparison, Variant
from mpishare.bench.problems.check import Pattern
from mpishare.bench.problems.ring import FenceRing, PairwiseRing, Ring

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.bench.cases import Case
    from mpishare.bench.report.rows import Row
    from mpishare.bench.session import Session

_READY, _DONE = 0, 1
_SLOT_NBYTES = 128
_PURPOSES = 2


def run(session: Session, case: Case) -> list[Row]:
    """Run a case and return its rows. Collective, host-blocking."""
    comparison = Comparison(session, case)
    barrier = session.node.comm.Barrier
    if case.name == "fence":
        pattern = Pattern(session.node.xp, 1)
        comparison.add("fence", partial(_OrderAll, session, pattern))
        if not session.on_cuda:  # where it orders no work on streams
            of_node = partial(_OrderAll, session, pattern, session.node.barrier)
            comparison.add("node.barrier", of_node)
        after_gpu = partial(_OrderAll, session, pattern, session.synchronized(barrier))
        comparison.add_baselines("barrier", {"barrier": after_gpu})
        counters = partial(_CountersOfAll, session, pattern)
        comparison.add_baselines("counters", {"counters": counters})
    else:
        ring = Ring(session, nbytes=8)
        ring.allocate()
        comparison.add("pairwise", partial(_Pairwise, ring))
        sendrecv = partial(_OrderNeighbors, ring, _exchange_nothing(ring))
        comparison.add_baselines("sendrecv", {"sendrecv": sendrecv})
        comparison.add_baselines("barrier", {"barrier": partial(_OrderNeighbors, ring, barrier)})
        comparison.add_baselines("counters", {"counters": partial(_CountersOfNeighbors, ring)})
    return comparison.run()


class _OrderAll(Variant):
    """Order all ranks, by default with a fence; checked by a word of each that all others read.

    The words alternate between two halves of a segment: a half is written again two steps later,
    when its readers have come through the order in between.
    """

    moves = False

    def __init__(
        self, session: Session, pattern: Pattern, order: Callable[[], object] | None = None
    ) -> None:
        self.node = session.node
        self._pattern = pattern
        self._window = self.node.allocate_each((2, 1), "u8", fill=0)
        self._half = 0
        self._order = self._window.fence if order is None else order

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


class _CountersOfAll(_OrderAll):
    """A word written to every other rank and waited for from each, in one batch."""

    def __init__(self, session: Session, pattern: Pattern) -> None:
        others = [rank for rank in range(session.node.size) if rank != session.node.rank]
        self._counters = _Counters(session)
        super().__init__(session, pattern, self._counters.batch(others, others))

    def close(self) -> None:
        self._counters.close()
        super().close()


class _Pairwise(PairwiseRing):
    """The calls of a window; a checked step has a word between start and complete."""

    moves = False

    def step(self) -> None:
        window, peers = self.window, self.problem.peers
        window.post(peers)
        window.start(peers)
        window.complete()
        window.wait()

    def checked_step(self, token: int) -> None:
        self.check_around(super().step, token)


class _OrderNeighbors(FenceRing):
    """One call that orders at least the neighbors; a checked step stores a word before it."""

    moves = False

    def step(self) -> None:
        self.order()

    def checked_step(self, token: int) -> None:
        self.check_around(self.move, token)


class _CountersOfNeighbors(PairwiseRing):
    """The four calls as bare operations: ready written, waited for, done written, waited for."""

    moves = False

    def __init__(self, ring: Ring) -> None:
        super().__init__(ring)
        self._counters = _Counters(ring.session)
        batch, peers = self._counters.batch, ring.peers
        self._post, self._start = batch(peers, [], _READY), batch([], peers, _READY)
        self._complete, self._wait = batch(peers, [], _DONE), batch([], peers, _DONE)

    def step(self) -> None:
        self._post()
        self._start()
        self._complete()
        self._wait()

    def checked_step(self, token: int) -> None:
        self.check_around(self._step_with_data, token)

    def _step_with_data(self) -> None:
        self._post()
        self._start()
        self.store()
        self._complete()
        self._wait()

    def close(self) -> None:
        self._counters.close()
        super().close()


def _exchange_nothing(ring: Ring) -> Callable[[], None]:
    """Return a call that sends no bytes to both neighbors and receives none from each."""
    comm, left, right = ring.node.comm, ring.left, ring.right
    synchronize, nothing = ring.session.synchronize, bytearray(0)

    def exchange() -> None:
        synchronize()
        comm.Sendrecv(nothing, right, 0, nothing, left, 0)
        comm.Sendrecv(nothing, left, 1, nothing, right, 1)

    return exchange


class _Counters:
    """Bare stream memory operations: the cost of order with no library around it. CUDA only.

    Each rank has a word for every rank and purpose in its own device memory, 128 bytes apart. A
    peer writes the number of the step there; the owner's stream waits until the word has reached
    it.
    """

    def __init__(self, session: Session) -> None:
        node = session.node
        nbytes = node.size * _PURPOSES * _SLOT_NBYTES
        self._window = node.allocate_each((nbytes // 8,), "u8", fill=0)
        self._rank = node.rank
        self._bases = [int(self._window.segment(rank).data.ptr) for rank in range(node.size)]
        self._stream = int(session.stream.ptr)

    def _address(self, owner: int, writer: int, purpose: int) -> int:
        return self._bases[owner] + (writer * _PURPOSES + purpose) * _SLOT_NBYTES

    def batch(
        self, writes: Sequence[int], waits: Sequence[int], purpose: int = 0
    ) -> Callable[[], None]:
        """Return a call that enqueues one batch, of the number of the call. Stream-ordered.

        The batch writes that number to the words of the ranks `writes`, then waits until the ranks
        `waits` have written it here.
        """
        from mpishare.backends.driver import CudaSignals

        operations = [("write", self._address(peer, self._rank, purpose)) for peer in writes]
        operations += [("wait", self._address(self._rank, peer, purpose)) for peer in waits]
        count, stream, value = len(operations), self._stream, 0
        signals = CudaSignals(operations, 0, "the bench's bare operations")

        def enqueue() -> None:
            nonlocal value
            value += 1
            if count:
                signals.enqueue(stream, [value] * count)

        return enqueue

    def close(self) -> None:
        self._window.close()

"""Cases ``ring`` and ``pairwise``, and the order of ranks by bare stream memory operations.

``ring`` moves a face to both neighbors and one from each through windows; it is a halo exchange
along one axis whose faces and ghosts are buffers of their own. The baselines move the same bytes
between private memory; on CUDA MPI is staged, with one copy of both faces to pinned memory and one
of both ghosts back. ``pairwise`` has post, start, complete and wait with both neighbors, and no
data. Its baselines are what one writes without windows: wait for the GPU, then `MPI_Barrier`, or a
message of no bytes to both neighbors; and, on CUDA, the same order by bare stream memory
operations, in the same four batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mpi4py import MPI

from mpishare import Window
from mpishare.bench.cases import Case
from mpishare.bench.comparison import Comparison
from mpishare.bench.fence import Order, Ring, WindowRing, by_call
from mpishare.bench.grid import Problem
from mpishare.bench.halo import Forms, add_baselines
from mpishare.bench.mpi import free, isend, persistent, sendrecv
from mpishare.bench.report import BASELINE
from mpishare.bench.session import Bound, Call, Session, do_nothing, in_turn
from mpishare.bench.staged import Staging, staged

#: Faces of memory that a rank allocates: its own, the check's, the windows' and the baselines'.
_COPIES = 20


def in_pairs(ring: Ring, *, moves: bool) -> WindowRing:
    """Return a variant by post, start, complete and wait with all peers."""

    def order(window: Window) -> Order:
        before = partial(window.post, ring.peers), partial(window.start, ring.peers)
        return before, (window.complete, window.wait), do_nothing

    return WindowRing(ring, order, places=1, moves=moves)


#: A face that is to go, behind the place for it in the segment of another rank.
Copy = tuple[Any, Any]


class Unordered(WindowRing):
    """Stores with no order between the ranks; a checked step has a fence before and behind them."""

    def __init__(self, ring: Ring, stores: Callable[[Sequence[Copy]], Call]) -> None:
        def order(window: Window) -> Order:
            return (window.fence,), (window.fence,), do_nothing

        super().__init__(ring, order, places=1, moves=True)
        self.step = stores(self.copies[0])

    def store(self) -> None:
        self.step()


def _staged_persistent(problem: Problem, *fields: Any) -> Bound:
    """Bind the same as staged with persistent requests."""
    staging, comm = Staging(problem, fields), problem.comm
    startall, waitall = MPI.Prequest.Startall, MPI.Request.Waitall
    sends = [comm.Send_init(*each) for each in staging.sends]
    receives = [[comm.Recv_init(*each) for each in half] for half in staging.receives]
    every = [[*half, *sends] for half in receives]

    def exchange() -> None:
        half = staging.half
        startall(receives[half])
        staging.copy_out()
        startall(sends)
        waitall(every[half])
        staging.copy_in()

    return exchange, partial(free, [*sends, *receives[0], *receives[1]])


#: A word for each rank that writes, and each purpose: ready, and done.
_SLOT_NBYTES, _PURPOSES = 128, 2

_MPI: Forms = {
    "isend": isend,
    "persistent": persistent,
    "sendrecv": sendrecv,
    "staged": staged,
    "staged persistent": _staged_persistent,
}


def run_pairwise(session: Session, case: Case) -> None:
    ring = Ring(session, nbytes=8)
    comparison = Comparison(session, case, unfit=ring.unfit)
    comparison.add("pairwise", partial(in_pairs, ring, moves=False))
    barrier = session.node.comm.Barrier
    for name, call in (("sendrecv", _exchange_nothing(ring)), ("barrier", barrier)):
        comparison.add_baseline(name, partial(WindowRing, ring, by_call(call)))
    by_counters = partial(WindowRing, ring, partial(_by_pairs_of_counters, ring), places=1)
    comparison.add_baseline("counters", by_counters)
    comparison.run()


def run(session: Session, case: Case) -> None:
    for nbytes in session.sizes(case, _COPIES):
        ring, sent = Ring(session, nbytes), 2 * nbytes
        comparison = Comparison(session, case, nbytes=nbytes, sent_nbytes=sent, unfit=ring.unfit)
        comparison.add("window pairwise", partial(in_pairs, ring, moves=True))
        comparison.add("window fence", partial(WindowRing, ring, moves=True))
        add_baselines(comparison, ring, _MPI)
        comparison.run()


def enter_counters(comparison: Comparison, ring: Ring) -> None:
    by_counters = partial(WindowRing, ring, partial(_by_counters, ring))
    comparison.add("counters", by_counters, kind=BASELINE)


def _by_counters(ring: Ring, _: Window) -> Order:
    """Write a word to every peer and wait for one of each, in one batch."""
    counters = _Counters(ring.session)
    return (), (counters.batch(ring.peers, ring.peers),), counters.close


def _by_pairs_of_counters(ring: Ring, _: Window) -> Order:
    """Do as the four calls: ready written, waited for, done written, waited for."""
    counters, peers = _Counters(ring.session), ring.peers
    of_ready, of_done = (
        (counters.batch(peers, [], purpose), counters.batch([], peers, purpose))
        for purpose in range(_PURPOSES)
    )
    return of_ready, of_done, counters.close


def _exchange_nothing(ring: Ring) -> Call:
    """Return a call that sends no bytes to both neighbors and receives none from each."""
    sendrecv, nothing = ring.node.comm.Sendrecv, bytearray(0)
    ends = zip(ring.targets, ring.sources, strict=True)
    calls = [partial(sendrecv, nothing, to, k, nothing, at, k) for k, (to, at) in enumerate(ends)]
    return ring.session.synchronized(in_turn(*calls))


class _Counters:
    """Bare stream memory operations: the cost of order with no library around it. CUDA only.

    Each rank has a word for every rank and purpose in its own device memory, 128 bytes apart, where
    a peer writes the number of the step, for which the owner's stream waits.
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
        """Return a batch that writes its number to the ranks `writes`, then waits for `waits`."""
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

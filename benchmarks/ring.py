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

from mpishare.bench.cases import Case
from mpishare.bench.check import Check, Part, Pattern, word
from mpishare.bench.comparison import Comparison
from mpishare.bench.fence import OrderAll
from mpishare.bench.grid import Exchange, Problem, Side
from mpishare.bench.halo import Forms, add_baselines
from mpishare.bench.mpi import free, isend, persistent, sendrecv
from mpishare.bench.report import BASELINE
from mpishare.bench.session import Bound, Call, Session, do_nothing, in_turn
from mpishare.bench.staged import Staging, staged

#: The sides of a ring, by the way a face travels: place k of the faces goes to place k of the
#: ghosts of the left or of the right neighbor.
LEFTWARD, RIGHTWARD = 0, 1
#: Faces of memory that a rank allocates: its own, the check's, the windows' and the baselines'.
_COPIES = 20


class Ring(Problem):
    """The ranks of a node, the faces and the ghosts of each, by the way they travel."""

    has_buffers = True

    def __init__(self, session: Session, nbytes: int) -> None:
        node = session.node
        self.session, self.comm, self.node = session, session.comm, node
        self.words, self.side_nbytes = nbytes // 8, nbytes
        # Ranks in node.comm; this rank itself where it is alone.
        self.left, self.right = ((node.rank + step) % node.size for step in (-1, 1))
        self.peers = sorted({self.left, self.right} - {node.rank})
        left, right = node.ranks[self.left], node.ranks[self.right]
        self.sides = (
            Side(left, right, LEFTWARD, LEFTWARD, LEFTWARD),
            Side(right, left, RIGHTWARD, RIGHTWARD, RIGHTWARD),
        )
        self._owners = {LEFTWARD: self.right, RIGHTWARD: self.left}
        _, self.unfit = session.attempt(self._allocate)

    def _allocate(self) -> None:
        self.fields = tuple(self.node.xp.zeros((2, self.words), "u8") for _ in range(2))
        place = self.node.xp.arange(self.words, dtype="u8")

        def words(owner: int, way: int) -> Any:
            return place + self.node.xp.uint64(word(owner, way, 0))

        sent = [Part(0, way, words(self.node.rank, way)) for way in self._owners]
        received = [Part(1, way, words(owner, way)) for way, owner in self._owners.items()]
        self.check = Check(self.node.xp, self.fields, sent, received, [(1, ...)])

    def ends(self, fields: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        return fields[:1], fields[1:]


class WindowRing(Exchange[Ring]):
    """A variant that stores both faces into the neighbors' segments of a window.

    Without `moves` the order alone is timed, and a checked step moves the faces all the same.
    """

    #: Places for the ghosts in each segment.
    places = 1

    def __init__(self, ring: Ring, *, moves: bool = True) -> None:
        self.moves = moves
        self.place = 0  # of the last step
        self.window = ring.node.allocate_each((self.places, 2, ring.words), "u8", fill=0)
        # For each place the ghosts of the neighbors.
        left, right = self.window.segment(ring.left), self.window.segment(ring.right)
        self.to_left = [left[place, LEFTWARD] for place in range(self.places)]
        self.to_right = [right[place, RIGHTWARD] for place in range(self.places)]
        super().__init__(ring, self.bind)

    def bind(self, ring: Ring, *_: Any) -> Bound:
        """Return the step, and what frees what it needs beside the window."""
        raise NotImplementedError

    def current(self) -> Sequence[Any]:
        return self.fields[0], self.window.array[self.place]

    def store(self) -> None:
        copyto, faces, place = self.problem.node.xp.copyto, self.fields[0], self.place
        copyto(self.to_left[place], faces[LEFTWARD])
        copyto(self.to_right[place], faces[RIGHTWARD])

    def move(self) -> None:
        """Move both faces, also where the step does not."""
        self.step()

    def close(self) -> None:
        super().close()
        del self.to_left, self.to_right
        self.window.close()


class PairwiseRing(WindowRing):
    """Store between start and complete, the second and the third of four calls."""

    def calls(self, ring: Ring) -> tuple[tuple[Call, Call, Call, Call], Call]:
        """Return the calls, and what frees what they need."""
        post, start = (partial(each, ring.peers) for each in (self.window.post, self.window.start))
        return (post, start, self.window.complete, self.window.wait), do_nothing

    def bind(self, ring: Ring, *_: Any) -> Bound:
        (post, start, complete, wait), free_calls = self.calls(ring)

        def step(*, is_stored: bool = self.moves) -> None:
            post()
            start()
            if is_stored:
                self.store()
            complete()
            wait()

        self.move = partial(step, is_stored=True)  # type: ignore[method-assign]
        return step, free_calls

    def close(self) -> None:
        del self.move
        super().close()


class FenceRing(WindowRing):
    """Store, then order all ranks with one call: by default a fence.

    A place is written again two steps later, when its reader has come through the call in between.
    """

    places = 2

    def __init__(self, ring: Ring, order: Call | None = None) -> None:
        self._order = order
        super().__init__(ring, moves=order is None)

    def bind(self, ring: Ring, *_: Any) -> Bound:  # noqa: ARG002
        return (self.move if self.moves else self._order or self.window.fence), do_nothing

    def move(self) -> None:
        self.place = 1 - self.place
        self.store()
        (self._order or self.window.fence)()


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


_READY, _DONE = 0, 1
_SLOT_NBYTES = 128
_PURPOSES = 2

_MPI: Forms = {
    "isend": isend,
    "persistent": persistent,
    "sendrecv": sendrecv,
    "staged": staged,
    "staged persistent": _staged_persistent,
}


def run_pairwise(session: Session, case: Case) -> None:
    comparison, ring = Comparison(session, case), Ring(session, nbytes=8)
    comparison.add("pairwise", partial(PairwiseRing, ring, moves=False))
    order = partial(FenceRing, ring)
    sendrecv, barrier = _exchange_nothing(ring), session.node.comm.Barrier
    comparison.add_baseline("sendrecv", partial(order, sendrecv))
    comparison.add_baseline("barrier", partial(order, barrier))
    comparison.add_baseline("counters", partial(_CountersOfNeighbors, ring))
    comparison.run()


def run(session: Session, case: Case) -> None:
    for nbytes in session.sizes(case, _COPIES):
        ring, sent = Ring(session, nbytes), 2 * nbytes
        comparison = Comparison(session, case, nbytes=nbytes, sent_nbytes=sent, unfit=ring.unfit)
        comparison.add("window pairwise", partial(PairwiseRing, ring))
        comparison.add("window fence", partial(FenceRing, ring))
        add_baselines(comparison, ring, _MPI)
        comparison.run()


def enter_counters(comparison: Comparison, session: Session) -> None:
    make = partial(_CountersOfAll, session, Pattern(session.node.xp, 1))
    comparison.add("counters", make, kind=BASELINE)


class _CountersOfAll(OrderAll):
    """A word written to every other rank and waited for from each, in one batch."""

    def __init__(self, session: Session, pattern: Pattern) -> None:
        others = [rank for rank in range(session.node.size) if rank != session.node.rank]
        self._counters = _Counters(session)
        super().__init__(session, pattern, self._counters.batch(others, others))

    def close(self) -> None:
        self._counters.close()
        super().close()


class _CountersOfNeighbors(PairwiseRing):
    """The four calls as bare operations: ready written, waited for, done written, waited for."""

    def calls(self, ring: Ring) -> tuple[tuple[Call, Call, Call, Call], Call]:
        counters = _Counters(ring.session)
        batch, peers = counters.batch, ring.peers
        ready, are_ready = batch(peers, [], _READY), batch([], peers, _READY)
        done, are_done = batch(peers, [], _DONE), batch([], peers, _DONE)
        return (ready, are_ready, done, are_done), counters.close


def _exchange_nothing(ring: Ring) -> Call:
    """Return a call that sends no bytes to both neighbors and receives none from each."""
    sendrecv, left, right, nothing = ring.node.comm.Sendrecv, ring.left, ring.right, bytearray(0)
    rightward = partial(sendrecv, nothing, right, 0, nothing, left, 0)
    leftward = partial(sendrecv, nothing, left, 1, nothing, right, 1)
    return ring.session.synchronized(in_turn(rightward, leftward))


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

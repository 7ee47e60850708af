"""Case ``ring``: a face moved to both neighbors, and one from each, through windows.

It is a halo exchange along one axis whose faces and ghosts are buffers of their own. The baselines
move the same bytes between private memory; on CUDA MPI is staged, with one copy of both faces to
pinned memory and one of both ghosts back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mpishare import Window
from mpishare.bench.cases import Case
from mpishare.bench.check import Check, Part, word
from mpishare.bench.comparison import Comparison
from mpishare.bench.grid import Exchange, Problem, Side
from mpishare.bench.halo import Forms, add_baselines
from mpishare.bench.mpi import isend, persistent, sendrecv
from mpishare.bench.session import Bound, Call, Session, do_nothing
from mpishare.bench.staged import staged

#: Faces of memory that a rank allocates: its own, the check's, the windows' and the baselines'.
_COPIES = 20


class Ring(Problem):
    """The ranks of a node, and the faces and ghosts of each, in two buffers.

    Face k goes to the rank `steps[k]` places on, as its ghosts k.
    """

    has_buffers = True

    def __init__(self, session: Session, nbytes: int, steps: Sequence[int] = (-1, 1)) -> None:
        node = session.node
        self.session, self.comm, self.node = session, session.comm, node
        self.words = nbytes // 8
        # Ranks in node.comm; this rank itself where it is alone.
        self.targets = [(node.rank + step) % node.size for step in steps]
        self.sources = [(node.rank - step) % node.size for step in steps]
        self.peers = sorted({*self.targets, *self.sources} - {node.rank})
        pairs = zip(self.targets, self.sources, strict=True)
        self.sides = tuple(
            Side(node.ranks[to], node.ranks[source], k, k, k)
            for k, (to, source) in enumerate(pairs)
        )
        _, self.unfit = session.attempt(self._allocate)

    def _allocate(self) -> None:
        xp, rank = self.node.xp, self.node.rank
        shape = len(self.sides), self.words
        self.fields = tuple(xp.zeros(shape, "u8") for _ in range(2))
        self.place = xp.arange(self.words, dtype="u8")
        sent = [Part(0, k, self.face(rank, k)) for k in range(len(self.sides))]
        received = [Part(1, k, self.face(source, k)) for k, source in enumerate(self.sources)]
        self.check = Check(xp, self.fields, sent, received, [(1, ...)])

    def face(self, owner: int, number: int, step: int = 0) -> Any:
        """Return the words of a face in a step."""
        return self.place + self.node.xp.uint64(word(owner, number, step))

    def ends(self, fields: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        return fields[:1], fields[1:]


#: Calls before the faces are stored and behind it.
Order = tuple[Sequence[Call], Sequence[Call]]


def by_fence(window: Window) -> Order:
    return (), (window.fence,)


class WindowRing(Exchange[Ring]):
    """A variant that stores the faces into the segments of a window that other ranks have.

    They land in so many `places` in turn: where one call orders all ranks, a place is written again
    two steps later, when its reader has come through the call in between.
    """

    def __init__(
        self,
        ring: Ring,
        order: Callable[[Window], Order] = by_fence,
        *,
        places: int = 2,
    ) -> None:
        self.places, self.place = places, 0  # the place of the last step
        shape = places, len(ring.sides), ring.words
        self.window = ring.node.allocate_each(shape, "u8", fill=0)
        segments = [self.window.segment(to) for to in ring.targets]
        #: For each place the ghosts of other ranks, and the faces that go there.
        self.copies = [
            [(each[place, k], ring.fields[0][k]) for k, each in enumerate(segments)]
            for place in range(places)
        ]
        super().__init__(ring, lambda *_: self._bind(*order(self.window)))

    def _bind(self, before: Sequence[Call], behind: Sequence[Call]) -> Bound:
        def move() -> None:
            self.place = (self.place + 1) % self.places
            for call in before:
                call()
            self.store()
            for call in behind:
                call()

        return move, do_nothing

    def current(self) -> Sequence[Any]:
        return self.fields[0], self.window.array[self.place]

    def store(self) -> None:
        copyto = self.problem.node.xp.copyto
        for ghosts, face in self.copies[self.place]:
            copyto(ghosts, face)

    def close(self) -> None:
        super().close()
        del self.copies
        self.window.close()


def in_pairs(ring: Ring) -> WindowRing:
    """Return a variant by post, start, complete and wait with all peers."""

    def order(window: Window) -> Order:
        before = partial(window.post, ring.peers), partial(window.start, ring.peers)
        return before, (window.complete, window.wait)

    return WindowRing(ring, order, places=1)


_MPI: Forms = {
    "isend": isend,
    "persistent": persistent,
    "sendrecv": sendrecv,
    "staged": staged,
}


def run(session: Session, case: Case) -> None:
    for nbytes in session.sizes(case, _COPIES):
        ring, sent = Ring(session, nbytes), 2 * nbytes
        comparison = Comparison(session, case, nbytes=nbytes, sent_nbytes=sent, unfit=ring.unfit)
        comparison.add("window pairwise", partial(in_pairs, ring))
        comparison.add("window fence", partial(WindowRing, ring))
        add_baselines(comparison, ring, _MPI)
        comparison.run()

"""A ring of ranks: each sends a face to both neighbors and receives one from each.

It is a halo exchange along one axis whose faces and ghosts are buffers of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishare.bench.problems.check import LEFTWARD, RIGHTWARD, RingCheck
from mpishare.bench.problems.exchange import Exchange, Problem, Side

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.bench.session import Session

#: Faces of memory that a rank allocates: its own, the check's, the windows' and the baselines'.
_COPIES = 17


class Ring(Problem):
    """The ranks of a node, the faces and the ghosts of each, by the way they travel."""

    has_buffers = True

    def __init__(self, session: Session, nbytes: int) -> None:
        node = session.node
        self.session, self.comm = session, session.comm
        self.node = node
        self.words, self.needed_nbytes = nbytes // 8, _COPIES * nbytes
        # Ranks in node.comm; this rank itself where it is alone.
        self.left = (node.rank - 1) % node.size
        self.right = (node.rank + 1) % node.size
        self.peers = sorted({self.left, self.right} - {node.rank})
        left, right = node.ranks[self.left], node.ranks[self.right]
        self.sides = (
            Side(left, right, LEFTWARD, LEFTWARD, LEFTWARD),
            Side(right, left, RIGHTWARD, RIGHTWARD, RIGHTWARD),
        )

    def allocate(self) -> None:
        """Make the fields and the check. Local."""
        self.fields = tuple(self.node.xp.zeros((2, self.words), "u8") for _ in range(2))
        self.check = RingCheck(self)

    def sides_by_axis(self) -> Sequence[tuple[Side, ...]]:
        """Return both sides: there is one axis."""
        return [self.sides]

    def leaving(self, side: Side, fields: Sequence[Any]) -> list[Any]:
        """Return the face that leaves through a side."""
        return [fields[0][side.out]]

    def arriving(self, side: Side, fields: Sequence[Any]) -> list[Any]:
        """Return the ghosts that arrive as a side."""
        return [fields[1][side.into]]


class WindowRing(Exchange[Ring]):
    """A variant that stores both faces into the neighbors' segments of a window."""

    #: Places for the ghosts in each segment.
    places = 1

    def __init__(self, ring: Ring) -> None:
        self.place = 0  # of the last step
        self.window = ring.node.allocate_each((self.places, 2, ring.words), "u8", fill=0)
        # For each place the ghosts of the neighbors.
        left, right = self.window.segment(ring.left), self.window.segment(ring.right)
        self.to_left = [left[place, LEFTWARD] for place in range(self.places)]
        self.to_right = [right[place, RIGHTWARD] for place in range(self.places)]
        super().__init__(ring)

    def current(self) -> Sequence[Any]:
        """Return the faces and the ghosts of the last step."""
        return self.fields[0], self.window.array[self.place]

    def store(self) -> None:
        """Copy both faces to the neighbors."""
        copyto, faces, place = self.problem.node.xp.copyto, self.fields[0], self.place
        copyto(self.to_left[place], faces[LEFTWARD])
        copyto(self.to_right[place], faces[RIGHTWARD])

    def close(self) -> None:
        """Close the window, once no view of it is left."""
        del self.to_left, self.to_right
        self.window.close()


class PairwiseRing(WindowRing):
    """Store between start and complete."""

    def step(self) -> None:
        """Move both faces, pairwise ordered."""
        window, peers = self.window, self.problem.peers
        window.post(peers)
        window.start(peers)
        self.store()
        window.complete()
        window.wait()


class FenceRing(WindowRing):
    """Store, then order all ranks with one call: by default a fence.

    A place is written again two steps later, when its reader has come through the call in between.
    """

    places = 2

    def __init__(self, ring: Ring, order: Callable[[], None] | None = None) -> None:
        super().__init__(ring)
        self.order = self.window.fence if order is None else order

    def move(self) -> None:
        """Move both faces."""
        self.place = 1 - self.place
        self.store()
        self.order()

    def step(self) -> None:
        """Move both faces."""
        self.move()

"""A ring of ranks: each sends a face to both neighbors and receives one from each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishare.bench.arm import Arm
from mpishare.bench.pattern import Pattern

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.bench.session import Session

#: Sides of a rank: where a face leaves and a ghost lies.
LEFT, RIGHT = 0, 1
#: Faces of memory that a rank takes: its own, the pattern's, the windows' and the rivals'.
_COPIES = 17


class Ring:
    """What all arms on one size share: the neighbors, the faces and the pattern in them.

    Local. The faces are private memory of this rank on its own device.

    Attributes
    ----------
    left, right : int
        Ranks in ``node.comm``; this rank itself where it is alone.
    peers : list of int
        The neighbors without this rank, each once.
    faces : array of uint64, (2, words)
        What goes to the left and to the right neighbor.
    """

    def __init__(self, session: Session, nbytes: int) -> None:
        node = session.node
        session.require_memory(_COPIES * nbytes)
        self.session = session
        self.node = node
        self.words = nbytes // 8
        self.left = (node.rank - 1) % node.size
        self.right = (node.rank + 1) % node.size
        self.peers = sorted({self.left, self.right} - {node.rank})
        self.faces: Any = node.xp.zeros((2, self.words), "u8")
        self.pattern = Pattern(node.xp, self.words)


class RingArm(Arm):
    """An arm that moves both faces of a `Ring`.

    Attributes
    ----------
    faces : array of uint64, (2, words)
        What goes to the left and to the right neighbor; those of the ring, unless the arm moves
        them from elsewhere.
    """

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.faces = ring.faces

    def ghosts(self) -> Any:
        """Return where the last step put the left and the right neighbor's face."""
        raise NotImplementedError

    def fill(self, token: int) -> None:
        """Write both faces."""
        ring = self.ring
        for side in (LEFT, RIGHT):
            ring.pattern.fill(self.faces[side], ring.node.rank, side, token)

    def poison(self) -> None:
        """Spoil both ghosts."""
        self.ring.pattern.poison(self.ghosts())

    def count(self, token: int) -> None:
        """Compare both ghosts with what the neighbors filled."""
        ring, ghosts = self.ring, self.ghosts()
        ring.pattern.count(ghosts[LEFT], ring.left, RIGHT, token)
        ring.pattern.count(ghosts[RIGHT], ring.right, LEFT, token)

    def wrong(self) -> int:
        """Return how many words of ghosts were wrong."""
        return self.ring.pattern.wrong()


class PairwiseArm(RingArm):
    """Store both faces into the neighbors' segments between start and complete."""

    def __init__(self, ring: Ring) -> None:
        super().__init__(ring)
        self.window = ring.node.allocate_each((2, ring.words), "u8", fill=0)
        # My left neighbor has me on its right.
        self._to_left = self.window.segment(ring.left)[RIGHT]
        self._to_right = self.window.segment(ring.right)[LEFT]

    def ghosts(self) -> Any:
        """Return this rank's segment."""
        return self.window.array

    def store(self) -> None:
        """Copy both faces to the neighbors."""
        copyto, faces = self.ring.node.xp.copyto, self.ring.faces
        copyto(self._to_left, faces[LEFT])
        copyto(self._to_right, faces[RIGHT])

    def step(self) -> None:
        """Move both faces, pairwise ordered."""
        window, peers = self.window, self.ring.peers
        window.post(peers)
        window.start(peers)
        self.store()
        window.complete()
        window.wait()

    def close(self) -> None:
        """Close the window, once no view of it is left."""
        del self._to_left, self._to_right
        self.window.close()


class ParityArm(RingArm):
    """Store both faces into halves of the segments that alternate, then order all with one call.

    A half is written again two steps later, when its reader has come through the call in between.
    """

    def __init__(self, ring: Ring, order: Callable[[], None] | None = None) -> None:
        super().__init__(ring)
        self.window = ring.node.allocate_each((2, 2, ring.words), "u8", fill=0)
        self._order = self.window.fence if order is None else order
        to_left, to_right = self.window.segment(ring.left), self.window.segment(ring.right)
        self._to_left = [to_left[half, RIGHT] for half in (0, 1)]
        self._to_right = [to_right[half, LEFT] for half in (0, 1)]
        self._half = 0

    def ghosts(self) -> Any:
        """Return the half of this rank's segment that the last step filled."""
        return self.window.array[self._half]

    def move(self) -> None:
        """Move both faces."""
        half = self._half = 1 - self._half
        copyto, faces = self.ring.node.xp.copyto, self.ring.faces
        copyto(self._to_left[half], faces[LEFT])
        copyto(self._to_right[half], faces[RIGHT])
        self._order()

    def step(self) -> None:
        """Move both faces."""
        self.move()

    def close(self) -> None:
        """Close the window, once no view of it is left."""
        del self._to_left, self._to_right
        self.window.close()

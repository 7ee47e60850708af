"""The arms that move words through a library between GPUs, see `mpishare.bench.links`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from mpishare.bench.arm import Arm, Entry
from mpishare.bench.cases.captured import Captured
from mpishare.bench.cases.halo_arms import HaloArm
from mpishare.bench.cases.halo_pack import Packing
from mpishare.bench.cases.neighbors import LEFT, RIGHT, Ring, RingArm
from mpishare.bench.links.known import ARMS, library
from mpishare.bench.links.link import Library, Link, open_library

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.bench.cases.halo_grid import Grid
    from mpishare.bench.session import Session


def entries(
    session: Session,
    word: str,
    arm: Callable[[Library], Arm] | None,
    sent_nbytes: int,
    reason: str | None,
) -> list[Entry]:
    """Return the entries of a library in a case and size.

    Collective, host-blocking where it is asked for first.

    Parameters
    ----------
    session : Session
        The run.
    word : str
        The library, as in ``--against``.
    arm : callable or None
        Makes an arm that moves words by it; None where nothing can run at this size.
    sent_nbytes : int, bytes
        What one rank sends in a step.
    reason : str or None
        Why no arm can run at this size.
    """
    found, refusal = open_library(session, library(word))

    def make(*, is_captured: bool) -> Arm:
        if arm is None or found is None:
            raise ValueError(f"{word}: not made, and asked for an arm")
        return Captured(session, arm(found)) if is_captured else arm(found)

    return [
        Entry(
            name,
            partial(make, is_captured=is_captured),
            sent_nbytes,
            kind="rival",
            unfit=reason or refusal,
        )
        for name, is_captured in ARMS[word].items()
    ]


class LinkedRing(RingArm):
    """Both faces from memory that the library reads to memory that it writes, with no copy."""

    def __init__(self, ring: Ring, found: Library) -> None:
        super().__init__(ring)
        self._library = found
        shape = 2, ring.words
        out = found.empty(2 * ring.words)
        into = [found.empty(2 * ring.words) for _ in range(found.halves)]
        self._memory = [out, *into]
        self.faces = out.reshape(shape)
        self._into = [each.reshape(shape) for each in into]
        self._turn = 0
        left, right = ring.node.ranks[ring.left], ring.node.ranks[ring.right]
        self._moves = [
            found.mover(
                [
                    # What leaves to the left lands on the right of who is there.
                    Link(left, right, self.faces[LEFT], ghosts[RIGHT]),
                    Link(right, left, self.faces[RIGHT], ghosts[LEFT]),
                ],
                early=True,
            )
            for ghosts in self._into
        ]

    def ghosts(self) -> Any:
        """Return where the last step put the faces."""
        return self._into[self._turn]

    def step(self) -> None:
        """Move both faces."""
        self._turn = (self._turn + 1) % len(self._moves)
        self._moves[self._turn]()

    def close(self) -> None:
        """Free the memory once nothing reads it any more."""
        self.ring.session.synchronize()
        del self._moves, self._into, self.faces
        while self._memory:
            self._library.free(self._memory.pop())


class LinkedHalo(HaloArm):
    """Pack all sides, move, unpack.

    From field to field, without packing, where every face is contiguous and the library may.
    """

    def __init__(self, grid: Grid, found: Library) -> None:
        super().__init__(grid, grid.fields)
        self._library = found
        self._memory: list[Any] = []
        self._packing: Packing | None = None
        self._turn = 0
        sides = [side for side in grid.sides for _ in self.fields]
        out = [field[side.source] for side in grid.sides for field in self.fields]
        into = [field[side.target] for side in grid.sides for field in self.fields]
        if found.is_direct and all(view.flags.c_contiguous for view in (*out, *into)):
            links = [
                Link(side.neighbor, side.opposite, a.view("u8").ravel(), b.view("u8").ravel())
                for side, a, b in zip(sides, out, into, strict=True)
            ]
            self._moves = [found.mover(links, early=False)]
            return
        packing = self._packing = Packing(grid, self.fields)
        self._memory = [found.empty(packing.total) for _ in range(1 + found.halves)]
        packed, *landed = self._memory
        self._moves = [
            found.mover(
                [
                    Link(side.neighbor, side.opposite, a, b)
                    for side, a, b in zip(
                        grid.sides, packing.split(packed), packing.split(half), strict=True
                    )
                ],
                early=True,
            )
            for half in landed
        ]

    def step(self) -> None:
        """Exchange the ghosts."""
        turn = self._turn = (self._turn + 1) % len(self._moves)
        if self._packing is None:
            self._moves[turn]()
            return
        self._packing.pack(self._memory[0])
        self._moves[turn]()
        self._packing.unpack(self._memory[1 + turn])

    def close(self) -> None:
        """Free the memory once nothing reads it any more."""
        self.grid.session.synchronize()
        del self._moves, self._packing, self.fields
        while self._memory:
            self._library.free(self._memory.pop())

"""What all arms of a halo case share: the cart, the shape of a field, who gets which cells.

Every rank owns a block of n cells along each axis of the cart, which is periodic in all of them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mpishare.bench.cases.halo_block import ITEM_NBYTES
from mpishare.bench.cases.halo_check import Check

if TYPE_CHECKING:
    from mpishare.bench.cases.halo_block import Block
    from mpishare.bench.session import Session

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Side:
    """A face, an edge or a corner of the block, and who is there.

    Attributes
    ----------
    neighbor, opposite : int
        The ranks in the cart on this side and on the other one.
    source : tuple of slice
        The owned cells that go to `neighbor`.
    target : tuple of slice
        The ghosts that are filled by `opposite`, whose `source` of this same side it is.
    number : int
        Of the side: as a tag it tells apart the messages of two ranks that meet on several sides.
    """

    neighbor: int
    opposite: int
    source: Slices
    target: Slices
    number: int


class Grid:
    """One size of a halo case.

    Collective over the session's communicator: makes the cart.

    Attributes
    ----------
    naxes, n, width, count : int
        Axes of the cart, owned cells along each of them, ghosts a side, fields.
    shape : tuple of int
        Of a field, ghosts counted.
    axes : tuple of int
        Those of a field that the cart cuts.
    face_nbytes, sent_nbytes : int, bytes
        One face of one field; all that one rank sends in an exchange.
    sides : tuple of Side
        The faces and, with corners, the edges and corners.
    crowd : str or None
        What to say of a rival that spins, where some node has more ranks than cores: each step
        would take time slices, and the run minutes.
    fields : list of array of float64
        Private memory of this rank. All arms without windows work on it in turn, as one does in a
        program.
    check : Check
        Fills, poisons and checks fields.
    """

    def __init__(self, session: Session, block: Block) -> None:
        naxes = block.naxes
        self.session = session
        self.naxes, self.n, self.width = naxes, block.n, block.width
        self.count, self.corners = block.count, block.corners
        self.shape, self.face_nbytes = block.shape, block.face_nbytes
        self.axes = tuple(range(naxes))
        dims = MPI.Compute_dims(session.comm.size, naxes)
        # The ranks keep their numbers: the node and the report know them by these.
        self.cart = session.comm.Create_cart(dims, [True] * naxes, reorder=False)
        self._coords = self.cart.Get_coords(self.cart.rank)
        self.crowd = _crowd(session)
        self.sides = self._sides()
        self.sent_nbytes = ITEM_NBYTES * self.count * sum(self.size(side) for side in self.sides)

    def allocate(self) -> None:
        """Make the private fields and the check. Local."""
        xp = self.session.node.xp
        self.fields: list[Any] = [xp.zeros(self.shape) for _ in range(self.count)]
        self.check = Check(self)

    def close(self) -> None:
        """Free the cart. Collective."""
        self.cart.Free()

    def size(self, side: Side) -> int:
        """Return how many cells of one field a side has. Local."""
        spans = zip(side.source, self.shape, strict=True)
        return prod(len(range(*span.indices(extent))) for span, extent in spans)

    def rank_at(self, direction: tuple[int, ...]) -> int:
        """Return the rank that is there, maybe this one. Local."""
        steps = zip(self._coords, direction, strict=True)
        return self.cart.Get_cart_rank([coord + step for coord, step in steps])

    def phases(self) -> list[tuple[Side, Side]]:
        """Return both faces of each axis; those with corners go one axis after the other.

        Local. With corners a face has the ghosts of the axes before it, so that edges and corners
        come along.
        """
        pairs = []
        for axis in self.axes:
            full = range(axis) if self.corners else ()
            units = [tuple(step * (axis == each) for each in self.axes) for step in (-1, 1)]
            low, high = (self._side(unit, 2 * axis + i, full) for i, unit in enumerate(units))
            pairs.append((low, high))
        return pairs

    def _sides(self) -> tuple[Side, ...]:
        every = product((-1, 0, 1), repeat=self.naxes)
        most = self.naxes if self.corners else 1
        kept = [each for each in every if 1 <= sum(map(abs, each)) <= most]
        return tuple(self._side(each, number) for number, each in enumerate(kept))

    def _side(self, direction: tuple[int, ...], number: int, full: Any = ()) -> Side:
        n, w = self.n, self.width
        owned, every = slice(w, w + n), slice(None)
        # By the step along an axis; -1 is the last.
        sources = (owned, slice(n, w + n), slice(w, 2 * w))
        targets = (owned, slice(0, w), slice(w + n, n + 2 * w))
        source = [every if i in full else sources[step] for i, step in enumerate(direction)]
        target = [every if i in full else targets[step] for i, step in enumerate(direction)]
        rest = [every] * (len(self.shape) - self.naxes)
        backward = tuple(-step for step in direction)
        return Side(
            neighbor=self.rank_at(direction),
            opposite=self.rank_at(backward),
            source=(*source, *rest),
            target=(*target, *rest),
            number=number,
        )


def _crowd(session: Session) -> str | None:
    """Return in words that a node has more ranks than cores, None where none has. Collective."""
    mine = session.node.size, len(os.sched_getaffinity(0))
    found = [each for each in session.comm.allgather(mine) if each[0] > each[1]]
    return f"it spins, and {found[0][0]} ranks share {found[0][1]} cores" if found else None

"""Blocks in a periodic cart, their sides, and the variants that exchange ghosts across these.

Every rank owns a block of n cells along each axis of the cart, with ghosts around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, product
from math import isqrt, prod
from typing import Any, Generic, TypeVar

import numpy as np
from mpi4py import MPI

from mpishare.bench.check import halo_check
from mpishare.bench.comparison import Variant
from mpishare.bench.copies import Copies, copy_all
from mpishare.bench.options import Options
from mpishare.bench.session import Bound, Call, Session, in_turn

Slices = tuple[slice, ...]
ITEM_NBYTES = 8


@dataclass(frozen=True)
class Side:
    """A side of a block, through which cells leave for one rank, and the opposite ghosts arrive.

    All ranks list their sides in the same order, and what leaves through a side of one rank arrives
    as the same side of another: `number` serves as a tag.
    """

    to: int  # ranks in the communicator of the problem
    source: int
    number: int
    out: Any  # index of the cells that `to` gets
    into: Any  # index of the ghosts that `source` fills


class Problem:
    """One exchange: the data, the neighbors and the check."""

    session: Session
    comm: MPI.Intracomm  # of messages, with the ranks of the session's
    #: Private memory of this rank, which all variants without memory of their own use by turns.
    fields: Sequence[Any]
    #: The sides, whose faces may move at the same time.
    sides: tuple[Side, ...]
    check: Any  # a `Check`, or what fills, poisons, verifies and counts as that does
    #: Whether `fields` are two contiguous buffers, of all that leaves and all that arrives, which a
    #: variant may put into any memory; otherwise it packs.
    has_buffers = False
    #: Why nothing can run here.
    unfit: str | None = None

    def sides_by_axis(self) -> Sequence[tuple[Side, ...]]:
        """Return the faces of each axis, which may need the ghosts of the axes before it."""
        return [self.sides]

    def arrays(self, allocate: Callable[..., Any]) -> Sequence[Any]:
        """Return arrays for the fields, made by `allocate` of a shape and a dtype."""
        raise NotImplementedError

    def ends(self, fields: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the arrays that are sent from, and the arrays that are received into."""
        return fields, fields

    def leaving(self, side: Side, fields: Sequence[Any]) -> list[Any]:
        return [array[side.out] for array in self.ends(fields)[0]]

    def arriving(self, side: Side, fields: Sequence[Any]) -> list[Any]:
        return [array[side.into] for array in self.ends(fields)[1]]

    def faces(self, fields: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return what leaves through all sides, side by side, and what arrives."""
        out, into = self._by_side(fields)
        return [*chain.from_iterable(out)], [*chain.from_iterable(into)]

    def _by_side(self, fields: Sequence[Any]) -> tuple[list[list[Any]], list[list[Any]]]:
        out = [self.leaving(side, fields) for side in self.sides]
        return out, [self.arriving(side, fields) for side in self.sides]

    def own(self, fields: Sequence[Any]) -> Copies:  # noqa: ARG002
        """Return the copies of a step that stay on the rank."""
        return ()

    def slots(self) -> list[int]:
        """Return how many words of a buffer each side has, as many on all ranks."""
        return [sum(map(_words, views)) for views in self._by_side(self.fields)[0]]

    def parts(self, out: Any, into: Any) -> tuple[list[Any], list[Any]]:
        """Return the words of two buffers that leave through each side, and that arrive."""
        slots = self.slots()
        found = []
        for buffer, of_sides in zip((out, into), self._by_side(self.fields), strict=True):
            pairs = zip(split(buffer, slots), of_sides, strict=True)
            found.append([slot[: sum(map(_words, views))] for slot, views in pairs])
        return found[0], found[1]

    def packing(self, fields: Sequence[Any], out: Any, into: Any) -> tuple[Call, Call]:
        """Return the calls that pack what leaves into a buffer, and unpack another. Local.

        Within a side the faces of all fields stand side by side. The first call also makes the
        copies that stay on the rank.
        """
        both = zip(self.parts(out, into), self._by_side(fields), strict=True)
        packs, unpacks = (
            [
                pair
                for part, views in zip(parts, of_sides, strict=True)
                for pair in zip(cut(part, views), views, strict=True)
            ]
            for parts, of_sides in both
        )
        session, arrivals = self.session, [(view, slot) for slot, view in unpacks]
        return copy_all(session, [*packs, *self.own(fields)]), copy_all(session, arrivals)

    def has_contiguous_faces(self) -> bool:
        """Return whether messages are all of a step, and nothing has to be packed."""
        if self.own(self.fields):
            return False
        out, into = self.faces(self.fields)
        return all(view.flags.c_contiguous for view in (*out, *into))


def split(buffer: Any, sizes: Sequence[int]) -> list[Any]:
    """Return the parts of a buffer that are so many words long, one after the other."""
    return [buffer[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _words(view: Any) -> int:
    return int(view.nbytes) // ITEM_NBYTES


def cut(buffer: Any, views: Sequence[Any]) -> list[Any]:
    """Return the parts of a buffer of words that hold the cells of these views, as they are."""
    parts = zip(split(buffer, [*map(_words, views)]), views, strict=True)
    return [part.view(view.dtype).reshape(view.shape) for part, view in parts]


P = TypeVar("P", bound=Problem)


class OfFields(Variant):
    """A variant with a `Check` of the fields that `current` returns."""

    def current(self) -> Sequence[Any]:
        """Return the fields of the last step."""
        raise NotImplementedError

    def fill(self, token: int) -> None:
        self.check.fill(self.current(), token)

    def poison(self) -> None:
        self.check.poison(self.current())

    def verify(self, token: int) -> None:
        self.check.verify(self.current(), token)


class Exchange(OfFields, Generic[P]):
    """A variant that exchanges the ghosts of fields, by default of those of the problem.

    `bind` returns the call that does it, and the one that frees what that needs; the call is made
    `steps` times in a step. `in_windows`: the fields are in windows.
    """

    def __init__(
        self,
        problem: P,
        bind: Callable[..., Bound],
        fields: Sequence[Any] | None = None,
        *,
        steps: int = 1,
        in_windows: bool = False,
    ) -> None:
        self.problem, self.check, self.steps = problem, problem.check, steps
        self.windows: Sequence[Any] = ()
        if in_windows:
            self.windows = problem.arrays(partial(problem.session.node.allocate_each, fill=0))
            fields = [window.array for window in self.windows]
        self.fields = tuple(problem.fields if fields is None else fields)
        # Ghosts that no exchange may write are compared too, from the first step on.
        self.poison()
        call, self._free = bind(problem, *self.fields)
        self.step = in_turn(*[call] * steps)

    def current(self) -> Sequence[Any]:
        return self.fields

    def close(self) -> None:
        del self.fields
        self._free()
        del self._free  # windows must have no views left
        for window in reversed(self.windows):
            window.close()


#: Owned cells across a thin block, in widths: as few as leave an interior, since each row of cells
#: is a whole face.
_ROWS = 4
#: Sets of fields: in windows, private, and two that are new. And faces, per side: those of
#: the check and the baselines.
_SETS, _FACES = 4, 20


@dataclass(frozen=True)
class Block:
    """The block of every rank, the same on all."""

    n: int  # owned cells along each axis that is cut
    uncut: tuple[int, ...]  # the extents of the axes after them
    naxes: int  # axes that are cut
    width: int = 1  # ghosts per side
    count: int = 1  # fields
    corners: bool = False  # whether edges and corners have ghosts that are exchanged

    @classmethod
    def of(cls, options: Options, naxes: int, nbytes: int) -> Block:
        """Return the block whose face, of one field, is as near to `nbytes` as possible."""
        width = options.width
        area = max(nbytes // (ITEM_NBYTES * width), 1)
        n = _ROWS * width if naxes == 1 else max(square(area), width)
        uncut = (area,) if naxes == 1 else ()  # thin, so that a face has any size
        return cls(n, uncut, naxes, width, options.fields, options.corners)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a field, ghosts included."""
        return (self.n + 2 * self.width,) * self.naxes + self.uncut

    @property
    def face_nbytes(self) -> int:
        """The size of one face of one field."""
        return ITEM_NBYTES * self.width * int(self.n ** (self.naxes - 1)) * prod(self.uncut)

    @property
    def needed_nbytes(self) -> int:
        """The memory of a rank for all variants of a case."""
        face = int((self.n + 2 * self.width) ** (self.naxes - 1)) * prod(self.uncut) * self.width
        faces_nbytes = ITEM_NBYTES * _FACES * 2 * self.naxes * face
        return self.count * (_SETS * ITEM_NBYTES * prod(self.shape) + faces_nbytes)


def square(area: int) -> int:
    """Return the side of the nearest square."""
    side = isqrt(area)
    # (s + 1/2)^2 is not an integer: up to s^2 + s the square of s is nearer.
    return side + (area > side * (side + 1))


class Grid(Problem):
    """One size of a halo case, with its fields. Collective over the session: makes the cart."""

    def __init__(self, session: Session, block: Block) -> None:
        naxes = block.naxes
        self.session = session
        self.naxes, self.n, self.width = naxes, block.n, block.width
        self.count, self.corners, self.shape = block.count, block.corners, block.shape
        #: The axes of a field that the cart cuts.
        self.axes = tuple(range(naxes))
        dims = MPI.Compute_dims(session.comm.size, naxes)
        # No reordering: the node and the report use the ranks of the session.
        self.comm = self.cart = session.comm.Create_cart(dims, [True] * naxes, reorder=False)
        self._coords = self.cart.Get_coords(self.cart.rank)
        self.sides = self._sides()
        #: Everything that one rank sends in an exchange.
        field = np.broadcast_to(0.0, self.shape)  # of no memory
        self.sent_nbytes = self.count * sum(field[side.out].nbytes for side in self.sides)
        _, self.unfit = session.attempt(self._allocate)

    def _allocate(self) -> None:
        self.fields = self.arrays(self.session.node.xp.zeros)
        self.check = halo_check(self)

    def arrays(self, allocate: Callable[..., Any]) -> Sequence[Any]:
        return tuple(allocate(self.shape, float) for _ in range(self.count))

    def close(self) -> None:
        self.cart.Free()

    def rank_at(self, direction: tuple[int, ...]) -> int:
        """Return the rank in that direction, which may be this one."""
        steps = zip(self._coords, direction, strict=True)
        return self.cart.Get_cart_rank([coord + step for coord, step in steps])

    def sides_by_axis(self) -> list[tuple[Side, Side]]:
        """Return both faces of each axis, which have the ghosts of the axes before where needed."""
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
        directions = [each for each in every if 1 <= sum(map(abs, each)) <= most]
        return tuple(self._side(each, number) for number, each in enumerate(directions))

    def _side(self, direction: tuple[int, ...], number: int, full: Any = ()) -> Side:
        n, w = self.n, self.width
        owned, every = slice(w, w + n), slice(None)
        # Indexed by the step along an axis; -1 is the last.
        sources = (owned, slice(n, w + n), slice(w, 2 * w))
        targets = (owned, slice(0, w), slice(w + n, n + 2 * w))
        out = [every if i in full else sources[step] for i, step in enumerate(direction)]
        into = [every if i in full else targets[step] for i, step in enumerate(direction)]
        rest = [every] * (len(self.shape) - self.naxes)
        backward = tuple(-step for step in direction)
        return Side(
            to=self.rank_at(direction),
            source=self.rank_at(backward),
            number=number,
            out=(*out, *rest),
            into=(*into, *rest),
        )

"""Lists of seams for common grids: blocks, faces of a cube, folds. Local, in Python alone.

Each function returns the seams of one rank for `SeamExchange`. Their boxes count from the ends of
fields, so that extents are not needed; axes of fields behind those of the grid travel whole. The
fields of a rank are its blocks in the order of the grid, the last axis fastest, with the components
of each one after the other.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpishare.halo.geometry import normalize_periods, normalize_widths
from mpishare.halo.seam import Seam

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import ArrayLike

    from mpishare.memory.types import Width

    Side = tuple[int, int]
    """An axis, and -1 or 1 for its begin or end."""
    Owners = Sequence[ArrayLike] | np.ndarray[Any, Any]
    """The ranks of the blocks of each face."""
    Joins = Mapping[tuple[int, Side], tuple[int, Side, bool]]

__all__ = ["blocks", "cubed_sphere", "faces", "tripolar"]


def blocks(
    owners: ArrayLike,
    width: Width,
    rank: int,
    *,
    periods: bool | Sequence[bool] = False,
    corners: bool = False,
    components: int = 1,
) -> list[Seam]:
    """Return the seams of a rank between the blocks of a grid.

    Parameters
    ----------
    owners : array of int
        The rank of each block: an array with the axes of the grid.
    width : int, or one int or (low, high) pair for each axis
        The ghosts of every block, in cells.
    rank : int
        The rank whose seams are listed.
    periods : bool, or one bool for each axis
        Which axes wrap.
    corners : bool
        Whether ghosts at edges and corners are exchanged too.
    components : int
        Fields of each block.

    Raises
    ------
    ValueError
        If `width` or `periods` do not fit the axes.

    Examples
    --------
    Three blocks in a row, of which this rank has all:

    >>> from mpi4py import MPI
    >>> u = [numpy.full(3, 1.0 + k) for k in range(3)]
    >>> found = blocks([0, 0, 0], 1, 0)
    >>> with mpishare.SeamExchange(MPI.COMM_SELF, u, found) as plan:
    ...     plan.exchange(*u)
    >>> u[1]
    array([1., 2., 3.])
    """
    grid = np.asarray(owners)
    (widths,) = normalize_widths(width, grid.ndim)
    wraps = normalize_periods(periods, grid.ndim)
    numbers, found = _numbers([grid]), []
    for block in _mine(grid, rank):
        for step in product((-1, 0, 1), repeat=grid.ndim):
            other = _beside(block, step, grid.shape, wraps)
            depths = [pair[each > 0] for pair, each in zip(widths, step, strict=True) if each]
            if other is None or not all(depths) or not 0 < len(depths) <= (9 if corners else 1):
                continue
            ends = [*zip(widths, step, strict=True)]
            into = tuple(_ghosts(pair, each) if each else _owned(pair) for pair, each in ends)
            box = tuple(
                _layer(pair, pair[each > 0], -each) if each else _owned(pair) for pair, each in ends
            )
            mine, theirs = numbers[0, block], numbers[0, other]
            found += [
                Seam(
                    (components * mine + each, into),
                    (int(grid[other]), components * theirs + each, box),
                )
                for each in range(components)
            ]
    return found


def faces(
    owners: Owners,
    joins: Joins,
    width: int,
    rank: int,
    *,
    corners: bool = False,
    components: int = 1,
    vectors: Sequence[tuple[int, int]] = (),
) -> list[Seam]:
    """Return the seams of a rank between faces of two axes, each a grid of blocks.

    Parameters
    ----------
    owners : sequence of array of int
        For each face the rank of each of its blocks.
    joins : dict
        ``{(face, side): (face, side, reversed)}``, each from one end or from both: a side is
        ``(axis, -1)`` or ``(axis, 1)``, and `reversed` says whether the two run against each other.
        Sides that are not joined are walls.
    width : int
        The ghosts of every block on all sides, in cells.
    rank : int
        The rank whose seams are listed.
    corners : bool
        Whether ghosts at the corners of blocks are exchanged too. Those beyond two sides of a face
        have no owner, as at the vertices of a cube, and are never written.
    components : int
        Fields of each block.
    vectors : sequence of pairs of int
        Components that are those of a vector along the two axes: over a turned side they change
        places and signs. For staggered fields write seams by hand.

    Raises
    ------
    ValueError
        If a side is joined to two others, or to one with another number of blocks.
    """
    grids = [np.asarray(face) for face in owners]
    both, numbers = _both_ways(grids, joins), _numbers(grids)
    found: list[Seam] = []
    for face, grid in enumerate(grids):
        for block in _mine(grid, rank):
            for near in _regions(block, grid.shape, corners=corners):
                far = _over(face, near, grids, both)
                if far is None:
                    continue
                mine, theirs = numbers[face, block], numbers[far.face, far.block]
                owner = int(grids[far.face][far.block])
                ends = mine, owner, theirs, components
                found += _over_side(near, far, width, ends, vectors)
    return found


def cubed_sphere(
    owners: Owners,
    width: int,
    rank: int,
    *,
    corners: bool = False,
    components: int = 1,
    vectors: Sequence[tuple[int, int]] = (),
) -> list[Seam]:
    """Return the seams of a rank on a cubed sphere, whose six faces are joined as NDSL's and FV3's.

    Axis 0 of each face is x, axis 1 is y. Parameters and errors as `faces`.
    """
    low, high = -1, 1
    joins: dict[Any, Any] = {}
    for face in range(6):
        axis = face % 2  # of the side that meets the next face, as it is
        joins[face, (axis, high)] = (face + 1) % 6, (axis, low), False
        joins[face, (1 - axis, high)] = (face + 2) % 6, (axis, low), True
    rest: dict[str, Any] = {"corners": corners, "components": components, "vectors": vectors}
    return faces(owners, joins, width, rank, **rest)


def tripolar(
    ranks: Sequence[int],
    columns: int,
    width: int,
    rank: int,
    *,
    pivot: int = 0,
    skip: int = 0,
    scale: complex = 1,
    field: int = 0,
) -> list[Seam]:
    """Return the seam of a rank at the fold of a tripolar grid: the ghosts north of its last row.

    Parameters
    ----------
    ranks : sequence of int
        Those of the last row of blocks, from west to east.
    columns : int
        The columns that each of them owns, between its ghosts. Axes are y, x.
    width : int
        The ghosts on all sides, in cells.
    rank : int
        The rank whose seams are listed: one beside that row has none.
    pivot : int
        Column i meets column ``pivot - 1 - i``, modulo all columns.
    skip : int
        Owned rows on the line of the fold, which are not read.
    scale : number
        -1 for components of vectors.
    field : int
        The field of the rank, the same number on all.
    """
    places = [*ranks]
    if rank not in places:
        return []
    pair = (width, width)
    rows = slice(-2 * width - skip, -width - skip)
    last = (places.index(rank) + 1) * columns + width
    return [
        Seam(
            (field, (_ghosts(pair, 1), slice(None))),
            [(each, field, (rows, _owned(pair))) for each in places],
            flip=(0, 1),
            scale=scale,
            along=1,
            start=pivot - last,
        )
    ]


Block = tuple[int, ...]


def _numbers(grids: Sequence[Any]) -> dict[tuple[int, Block], int]:
    """Return the number of each block among those of its rank."""
    counts: dict[int, int] = {}
    found = {}
    for face, grid in enumerate(grids):
        for block in np.ndindex(*grid.shape):
            owner = int(grid[block])
            found[face, block] = counts.get(owner, 0)
            counts[owner] = found[face, block] + 1
    return found


def _mine(grid: Any, rank: int) -> Iterator[Block]:
    return (block for block in np.ndindex(*grid.shape) if grid[block] == rank)


def _beside(block: Block, step: Block, shape: Sequence[int], wraps: Sequence[bool]) -> Block | None:
    """Return the block a step away; None beyond a wall."""
    found = []
    for at, each, extent, wrap in zip(block, step, shape, wraps, strict=True):
        place = (at + each) % extent
        if place != at + each and not wrap:
            return None
        found.append(place)
    return tuple(found)


def _owned(pair: tuple[int, int]) -> slice:
    return slice(pair[0], -pair[1] or None)


def _ghosts(pair: tuple[int, int], side: int) -> slice:
    """Return the ghosts on a side that has some."""
    return slice(0, pair[0]) if side < 0 else slice(-pair[1], None)


def _layer(pair: tuple[int, int], depth: int, side: int) -> slice:
    """Return so many owned cells at a side."""
    if side < 0:
        return slice(pair[0], pair[0] + depth)
    return slice(-pair[1] - depth, -pair[1] or None)


class _Region(NamedTuple):
    """Ghosts of a block beyond a side of a block of its face: its own, or for a corner the next."""

    block: Block
    axis: int
    side: int
    corner: int = 0  # at which end of the other axis they are


class _Far(NamedTuple):
    """The block beyond a side, and its own side there."""

    face: int
    block: Block
    axis: int
    side: int
    is_reversed: bool


def _regions(block: Block, shape: Sequence[int], *, corners: bool) -> Iterator[_Region]:
    """Yield the ghosts of a block that have an owner, where no side is a wall."""
    for axis, side in product((0, 1), (-1, 1)):
        yield _Region(block, axis, side)
    for steps in product((-1, 1), repeat=2) if corners else ():
        # Along the face first: so its corners are those of the blocks beside it.
        for axis in (0, 1):
            along = [*block]
            along[1 - axis] += steps[1 - axis]
            if 0 <= along[1 - axis] < shape[1 - axis]:
                yield _Region(tuple(along), axis, steps[axis], steps[1 - axis])
                break


def _both_ways(grids: Sequence[Any], joins: Joins) -> dict[Any, Any]:
    both: dict[Any, Any] = {}
    for (face, side), (other, there, is_reversed) in joins.items():
        ends = (face, side), (other, there)
        if grids[face].shape[1 - side[0]] != grids[other].shape[1 - there[0]]:
            raise ValueError(f"joins: {ends[0]} and {ends[1]} have other numbers of blocks")
        for near, far in (ends, ends[::-1]):
            if both.setdefault(near, (*far, is_reversed)) != (*far, is_reversed):
                raise ValueError(f"joins: {near} is joined to {both[near]} and to {far}")
    return both


def _over(face: int, region: _Region, grids: Sequence[Any], both: Mapping[Any, Any]) -> _Far | None:
    """Return the block beyond a side; None at a wall."""
    block, axis, side, _ = region
    at = block[axis] + side
    if 0 <= at < grids[face].shape[axis]:
        beside = (at, block[1]) if axis == 0 else (block[0], at)
        return _Far(face, beside, axis, -side, False)
    if (face, (axis, side)) not in both:
        return None
    other, (there, end), is_reversed = both[face, (axis, side)]
    shape, place = grids[other].shape, [0, 0]
    place[there] = 0 if end < 0 else shape[there] - 1
    along = block[1 - axis]
    place[1 - there] = shape[1 - there] - 1 - along if is_reversed else along
    return _Far(other, tuple(place), there, end, is_reversed)


def _over_side(
    near: _Region,
    far: _Far,
    width: int,
    ends: tuple[int, int, int, int],
    vectors: Sequence[tuple[int, int]],
) -> Iterator[Seam]:
    """Yield the seam of each component; `ends` are my block, its owner, theirs, and components."""
    mine, owner, theirs, components = ends
    pair, into, box, axes = (width, width), [slice(None)] * 2, [slice(None)] * 2, [0, 0]
    into[near.axis], box[far.axis] = _ghosts(pair, near.side), _layer(pair, width, far.side)
    into[1 - near.axis] = box[1 - far.axis] = _owned(pair)
    if near.corner:
        into[1 - near.axis] = _ghosts(pair, near.corner)
        end = near.corner if far.is_reversed else -near.corner
        box[1 - far.axis] = _layer(pair, width, end)
    axes[near.axis], axes[1 - near.axis] = far.axis, 1 - far.axis
    flip = [near.axis] if near.side == far.side else []
    flip += [1 - near.axis] if far.is_reversed else []
    for each in range(components):
        source, scale = each, 1
        for vector in vectors:
            if each in vector:
                along = vector.index(each)
                source, scale = vector[axes[along]], -1 if along in flip else 1
        yield Seam(
            (components * mine + each, tuple(into)),
            (owner, components * theirs + source, tuple(box)),
            axes=axes,
            flip=flip,
            scale=scale,
        )

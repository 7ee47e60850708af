"""Lists of seams for common grids: blocks, faces of a cube, folds. Local, in Python alone.

Each function returns the seams of one rank for `SeamExchange`. Their boxes count from the ends of
fields, so that extents are not needed; axes of fields behind those of the grid travel whole. The
fields of a rank are its blocks in the order of the grid, the last axis fastest, with the components
of each one after the other.
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from operator import add, index
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpishare.halo.geometry import normalize_periods, normalize_widths
from mpishare.halo.seam import Seam
from mpishare.memory.arguments import is_int

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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
    (grid,) = grids = _grids([owners])
    (widths,) = normalize_widths(width, grid.ndim)
    wraps = normalize_periods(periods, grid.ndim)

    def beside(_: int, block: Block, step: Block) -> _Beside | None:
        ends = zip(block, step, grid.shape, wraps, strict=True)
        place = tuple((at + each) % n if wrap else at + each for at, each, n, wrap in ends)
        return _Beside(0, place) if _is_within(place, grid) else None

    return _listed(grids, rank, widths, beside, corners=corners, components=components)


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
    rank, components : int
        As of `blocks`.
    corners : bool
        As of `blocks`. Ghosts beyond two sides of a face have no owner, as at the vertices of a
        cube, and are never written.
    vectors : sequence of pairs of int
        Components that are those of a vector along the two axes: over a turned side they change
        places and signs. For staggered fields write seams by hand.

    Raises
    ------
    ValueError
        If a side is joined to two others, or to one with another number of blocks; if there is no
        such face, side or component.
    """
    grids = _grids(owners, ndim=2)
    both = _both_ways(grids, joins)
    for vector in vectors:
        if len({*vector} & {*range(components)}) != 2:
            raise ValueError(f"vectors: {vector!r} is no pair of {components} components")

    def beside(face: int, block: Block, step: Block) -> _Beside | None:
        place, grid = tuple(map(add, block, step)), grids[face]
        if _is_within(place, grid):
            return _Beside(face, place)
        across = [axis for axis in (0, 1) if not 0 <= place[axis] < grid.shape[axis]]
        near = across[0], step[across[0]]
        if len(across) > 1 or (face, near) not in both:
            return None
        other, far, is_reversed = both[face, near]
        return _over(near, place, other, far, grids[other].shape, is_reversed=is_reversed)

    widths = [(_depth(width),) * 2] * 2
    rest: dict[str, Any] = {"corners": corners, "components": components, "vectors": vectors}
    return _listed(grids, rank, widths, beside, **rest)


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
    if len(owners) != 6:
        raise ValueError(f"a cube has six faces, and owners has {len(owners)}")
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
    width, rank : int
        As of `faces`. A rank beside that row has no seams.
    pivot : int
        Column i meets column ``pivot - 1 - i``, modulo all columns.
    skip : int
        Owned rows on the line of the fold, which are not read.
    scale : number
        -1 for components of vectors.
    field : int
        The field of the rank, the same number on all.
    """
    places, width = [*ranks], _depth(width)
    if len({*places}) < len(places):
        raise ValueError(f"ranks must be different, one for each block of the row, not {places}")
    if rank not in places or not width:
        return []
    row = _layer(width + skip, width, 1), slice(width, -width)
    last = (places.index(rank) + 1) * columns + width
    return [
        Seam(
            (field, (_layer(0, width, 1), slice(None))),
            [(each, field, row) for each in places],
            flip=(0, 1),
            scale=scale,
            along=1,
            start=pivot - last,
        )
    ]


Block = tuple[int, ...]


class _Beside(NamedTuple):
    """The block a step away, and how its axes lie in mine: as those of a `Seam`."""

    face: int
    block: Block
    axes: Sequence[int] | None = None
    flip: Sequence[int] = ()


def _grids(owners: Any, ndim: int | None = None) -> list[Any]:
    """Return the ranks of the blocks of each face as arrays, or raise `ValueError`."""
    grids = [np.asarray(each) for each in owners]
    for grid in grids:
        if (grid.size and grid.dtype.kind not in "iu") or grid.ndim != (ndim or grid.ndim):
            axes = "" if ndim is None else f" with {ndim} axes"
            raise ValueError(f"owners must be an array of ranks{axes}, not {grid.tolist()!r}")
    return grids


def _depth(width: Any) -> int:
    if not is_int(width) or width < 0:
        raise ValueError(f"width must be an int of 0 or more, not {width!r}")
    return index(width)


def _is_within(place: Block, grid: Any) -> bool:
    return all(0 <= at < extent for at, extent in zip(place, grid.shape, strict=True))


def _listed(
    grids: Sequence[Any],
    rank: int,
    widths: Sequence[tuple[int, int]],
    beside: Callable[[int, Block, Block], _Beside | None],
    *,
    corners: bool,
    components: int,
    vectors: Sequence[tuple[int, int]] = (),
) -> list[Seam]:
    """Return the seams of a rank: `beside` finds the block a step from another one, if any is."""
    numbers, found = _numbers(grids), []
    for (face, block), mine in numbers.items():
        for step in product((-1, 0, 1), repeat=len(block)) if grids[face][block] == rank else ():
            depths = [pair[each > 0] for pair, each in zip(widths, step, strict=True) if each]
            far = beside(face, block, step) if all(depths) else None
            if far is None or not depths or (len(depths) > 1 and not corners):
                continue
            owner, theirs = int(grids[far.face][far.block]), numbers[far.face, far.block]
            axes = far.axes or range(len(block))
            into, box = _boxes(widths, step, axes, far.flip)
            for each in range(components):
                source, scale = _component(each, vectors, axes, far.flip)
                ends = (components * mine + each, into), (owner, components * theirs + source, box)
                found.append(Seam(*ends, axes=far.axes, flip=far.flip, scale=scale))
    return found


def _numbers(grids: Sequence[Any]) -> dict[tuple[int, Block], int]:
    """Return the number of each block among those of its rank."""
    counts: Counter[int] = Counter()
    found = {}
    for face, grid in enumerate(grids):
        for block in np.ndindex(*grid.shape):
            found[face, block] = counts[int(grid[block])]
            counts[int(grid[block])] += 1
    return found


def _boxes(
    widths: Sequence[tuple[int, int]], step: Block, axes: Sequence[int], flip: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return the ghosts in the direction of a step, and the cells of the block there."""
    into, box = [], [slice(None)] * len(step)
    for axis, (pair, each) in enumerate(zip(widths, step, strict=True)):
        owned, depth = slice(pair[0], -pair[1] or None), pair[each > 0]
        side = each if axis in flip else -each
        into.append(_layer(0, depth, each) if each else owned)
        box[axes[axis]] = _layer(pair[side > 0], depth, side) if each else owned
    return tuple(into), tuple(box)


def _layer(first: int, depth: int, side: int) -> slice:
    """Return so many cells along an axis, the `first` ones from that side left out."""
    return slice(first, first + depth) if side < 0 else slice(-first - depth, -first or None)


def _component(
    number: int, vectors: Sequence[tuple[int, int]], axes: Sequence[int], flip: Sequence[int]
) -> tuple[int, int]:
    """Return what a component is in the axes of the block beside, and its sign there."""
    for vector in vectors:
        if number in vector:
            axis = vector.index(number)
            return vector[axes[axis]], -1 if axis in flip else 1
    return number, 1


def _both_ways(grids: Sequence[Any], joins: Joins) -> dict[Any, Any]:
    both: dict[Any, Any] = {}
    for (face, side), (other, there, is_reversed) in joins.items():
        ends = (face, side), (other, there)
        for number, (axis, end) in ends:
            if not 0 <= number < len(grids) or axis not in (0, 1) or end not in (-1, 1):
                raise ValueError(f"joins: no face has a side {(number, (axis, end))}")
        if grids[face].shape[1 - side[0]] != grids[other].shape[1 - there[0]]:
            raise ValueError(f"joins: {ends[0]} and {ends[1]} have other numbers of blocks")
        for near, far in (ends, ends[::-1]):
            if both.setdefault(near, (*far, is_reversed)) != (*far, is_reversed):
                raise ValueError(f"joins: {near} is joined to {both[near]} and to {far}")
    return both


def _over(
    near: Side, place: Block, face: int, far: Side, shape: Block, *, is_reversed: bool
) -> _Beside:
    """Return the block of another face that a step over a side leads to."""
    (axis, side), (there, end) = near, far
    block, axes = [0, 0], [0, 0]
    block[there] = 0 if end < 0 else shape[there] - 1
    along = place[1 - axis]
    block[1 - there] = shape[1 - there] - 1 - along if is_reversed else along
    axes[axis], axes[1 - axis] = there, 1 - there
    flip = [axis] if side == end else []
    return _Beside(face, tuple(block), axes, [*flip, 1 - axis] if is_reversed else flip)

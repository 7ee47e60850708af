"""Cartesian halos as integers: which box of which rank goes to which box of which neighbor.

All counts are cells along the axes of the cart; a field with more axes travels whole along the
others (`Box.along`). Ranks are those of the cart, which MPI numbers row by row.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import product
from math import prod
from operator import add, index
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpishare.memory.arguments import ghosts_of, items_of
from mpishare.plans.cells import Box

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mpishare.memory.types import Index

    Blocks = Mapping[int, "Block"] | Sequence["Block"]

Direction = tuple[int, ...]
"""A step of -1, 0 or 1 along each axis, from the receiver to the sender."""

Widths = tuple[tuple[int, int], ...]
"""The ghosts of one rank: (low, high) for each axis."""

_MOST_AXES = 64
"""More axes than any array has."""


class Block(NamedTuple):
    """The cells of one rank: `extents` owned ones, and ghosts of `widths` around them.

    `start`, of a plan's own block, has how many cells of the whole come before the first owned one
    along each axis of the grid, and `box` the owned cells in the whole.
    """

    extents: tuple[int, ...]
    widths: Widths
    start: tuple[int, ...] = ()

    @classmethod
    def of(cls, shape: Sequence[int], widths: Widths, axes: Sequence[int]) -> Block:
        """Return the block of a field of this shape; `ValueError` if it is too small."""
        extents = []
        for axis, (low, high) in zip(axes, widths, strict=True):
            extents.append(shape[axis] - low - high)
            if extents[-1] < 0:
                raise ValueError(
                    f"axis {axis} of a field of shape {tuple(shape)} has {shape[axis]} cells, "
                    f"fewer than its {low} + {high} ghosts. axes= names the axes that are cut, "
                    "also from the end, (-2, -1)"
                )
        return cls(tuple(extents), widths)

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents, ghosts counted."""
        return tuple(n + sum(pair) for n, pair in zip(self.extents, self.widths, strict=True))

    @property
    def box(self) -> Box:
        """The owned cells in the whole."""
        return Box(self.start, tuple(map(add, self.start, self.extents)))

    @property
    def owned(self) -> Box:
        return self.ghosts((0,) * len(self.extents))

    def ghosts(self, direction: Direction) -> Box:
        """Return the ghosts on that side: a face, an edge or a corner."""
        spans = []
        for step, extent, (low, high) in zip(direction, self.extents, self.widths, strict=True):
            top = low + extent
            spans.append(((low, top), (top, top + high), (0, low))[step])
        return Box(*zip(*spans, strict=True))


class Grid(NamedTuple):
    """The cart: `dims` ranks an axis, `periods` the axes that wrap.

    `empty` has the places along each axis at which no rank has cells: neighbors pass over them.

    Examples
    --------
    >>> grid = Grid((2, 3), (False, True))
    >>> grid.neighbor(5, (0, 1)), grid.neighbor(5, (1, 0)), grid.directions(corners=False)
    (3, None, ((-1, 0), (0, -1), (0, 1), (1, 0)))
    >>> row = Grid((4,), (True,), (frozenset({3}),))
    >>> row.neighbor(2, (1,)), row.readers(0, (1,))
    (0, [2, 3])
    """

    dims: tuple[int, ...]
    periods: tuple[bool, ...]
    empty: tuple[frozenset[int], ...] = ()

    def of_blocks(self, blocks: Sequence[Block]) -> Grid:
        """Return the grid with the places at which none of these blocks, by rank, has cells."""
        empty = []
        for axis, extent in enumerate(self.dims):
            stride = prod(self.dims[axis + 1 :])
            with_cells = (rank for rank, block in enumerate(blocks) if block.extents[axis])
            empty.append(
                frozenset(range(extent)).difference(r // stride % extent for r in with_cells)
            )
        return self._replace(empty=tuple(empty))

    def neighbor(self, rank: int, direction: Direction) -> int | None:
        """Return the next rank with cells, maybe `rank` itself; None beyond the domain's edge."""
        found, stride = 0, 1
        for axis in reversed(range(len(self.dims))):
            rank, place = divmod(rank, self.dims[axis])
            near = self._next(axis, place, direction[axis])
            if near is None:
                return None
            found += stride * near
            stride *= self.dims[axis]
        return found

    def readers(self, rank: int, direction: Direction) -> list[int]:
        """Return the ranks that have `rank` as their neighbor in that direction."""
        found, stride = [0], 1
        for axis in reversed(range(len(self.dims))):
            extent, step = self.dims[axis], direction[axis]
            rank, place = divmod(rank, extent)
            back = range(1, 2 + len(self.empty[axis])) if self.empty else (1,)
            places = sorted({(place - n * step) % extent for n in back})
            near = [each for each in places if self._next(axis, each, step) == place]
            found = [stride * each + rest for each in near for rest in found]
            stride *= extent
        return found

    def _next(self, axis: int, place: int, step: int) -> int | None:
        """Return the next place along an axis at which ranks have cells; None beyond the edge."""
        if not step:
            return place
        extent = self.dims[axis]
        for at in range(place + step, place + step * (extent + 1), step):
            if not self.periods[axis] and not 0 <= at < extent:
                return None
            if not self.empty or at % extent not in self.empty[axis]:
                return at % extent
        return None

    def directions(self, *, corners: bool) -> tuple[Direction, ...]:
        """Return the faces and, with `corners`, after them the edges and the corners."""
        every = list(product((-1, 0, 1), repeat=len(self.dims)))
        orders = range(1, len(self.dims) + 1 if corners else 2)
        return tuple(each for order in orders for each in every if sum(map(abs, each)) == order)


class Transfer(NamedTuple):
    """Owned cells of the sender that go to ghosts of the receiver, as many along each axis.

    Two ranks may be each other's neighbor on both sides, and a rank its own: a transfer is
    identified by sender, receiver and direction together.
    """

    direction: Direction
    sender: int
    receiver: int
    source: Box
    target: Box


class BlockTransfers(NamedTuple):
    """The block of one rank, and the transfers of its cells."""

    block: Block
    sent: tuple[Transfer, ...]
    received: tuple[Transfer, ...]


def normalize_dims(dims: Any, size: int) -> tuple[int, ...]:
    """Return the extents of a grid of `size` ranks, or raise `ValueError`.

    Zeros stay: MPI chooses these extents, so that the product is `size`.
    """
    try:
        found = tuple(map(index, dims))
    except TypeError:
        found = ()
    if not found or min(found) < 0:
        raise ValueError(
            f"dims must be ints of 0 or more, one for each axis of the grid, not {dims!r}"
        )
    product = prod(filter(None, found))
    if product != size and (0 not in found or size % product):
        raise ValueError(
            f"dims {found} are a grid of {product} ranks, the communicator has {size}. "
            f"mpi4py.MPI.Compute_dims({size}, {len(found)}) finds dims that fit"
        )
    return found


def normalize_periods(periods: Any, naxes: int) -> tuple[bool, ...]:
    """Return whether each axis wraps, or raise `ValueError`.

    A bool is for all axes, None for no axis.
    """
    if periods is None or isinstance(periods, bool | np.bool_):
        return (bool(periods),) * naxes
    try:
        found = [int(each) if isinstance(each, np.bool_) else index(each) for each in periods]
    except TypeError:
        found = []
    if len(found) != naxes or not {0, 1}.issuperset(found):
        raise ValueError(
            f"periods must be a bool, or one for each axis of the grid ({naxes} here), not "
            f"{periods!r}"
        )
    return tuple(map(bool, found))


def normalize_widths(width: Any, naxes: int, nfields: int = 1) -> list[Widths]:
    """Return (low, high) pairs, one for each axis of the cart, or raise `ValueError`.

    Those of all fields, alone, or where `width` cannot be that, those of each field.
    """
    of_all = ghosts_of(width, naxes)
    given = [of_all] if of_all else [ghosts_of(each, naxes) for each in items_of(width) or []]
    found = [each for each in given if each is not None]
    if found and len(found) == len(given) == (1 if of_all else nfields):
        return found
    of_fields = f", or a list of these for the {nfields} fields" if nfields > 1 else ""
    raise ValueError(
        "width must be a non-negative int, or one int or (low, high) pair for each axis of the "
        f"cart ({naxes} here){of_fields}, not {width!r}"
    )


def normalize_axes(axes: Any, naxes: int, ndim: int) -> tuple[int, ...]:
    """Return which axis of a field of `ndim` axes each axis of the cart cuts, or `ValueError`.

    An int stands for the one axis of the cart, None for all axes of a field that has no others.
    """
    cuts = f"the cart cuts {naxes} {'axis' if naxes == 1 else 'axes'}"
    if axes is None:
        if ndim == naxes:
            return tuple(range(ndim))
        todo = (
            f": say which with axes=, e.g. axes={tuple(range(-naxes, 0))}"
            if ndim > naxes
            else ": make a cart of no more axes than the field has"
        )
        raise ValueError(f"{cuts}, the field has {ndim}{todo}")
    found = _ints(axes)
    if ndim < naxes == len(found):  # of a plan for any fields: `axes` may be its default
        raise ValueError(f"{cuts}, the field has {ndim}")
    places = tuple(axis % ndim for axis in found if -ndim <= axis < ndim)
    if not len({*places}) == len(found) == naxes:
        raise ValueError(
            f"axes= must name {naxes} different axes of a field with {ndim}, one for each axis of "
            f"the cart, not {axes!r}"
        )
    return places


def _ints(values: Any) -> list[int]:
    """Return one int, or a sequence of them, as a list; empty for anything else."""
    with suppress(TypeError):
        return [index(value) for value in items_of(values) or [values]]
    return []


def normalize_block_axes(axes: Any, naxes: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return which axis of a block of this shape each axis of the cart cuts, or `ValueError`.

    A block has only the axes that are cut, in the order that `axes` gives them in its fields.
    """
    found = normalize_axes(tuple(range(naxes)) if axes is None else axes, naxes, _MOST_AXES)
    if len(shape) != naxes:
        raise ValueError(
            f"a Layout without dtype has the axes that the cart cuts, {naxes} here, and no others: "
            f"not shape {shape}"
        )
    order = sorted(found)
    return tuple(order.index(axis) for axis in found)


def fields_of_block(
    extents: Sequence[int], axes: Any
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return cut axes and shapes of two fields that stand for all fields of a block.

    `extents` count ghosts, one for each axis of the cart.
    """
    naxes = len(extents)
    axes = tuple(range(naxes)) if axes is None else axes
    named = list(axes) if hasattr(axes, "__iter__") else [axes]
    first = max(0, *(axis + 1 for axis in named)) + max(0, *(-axis for axis in named))
    cut = [normalize_axes(axes, naxes, ndim) for ndim in (first, first + 1)]
    shapes = []
    for ndim, own in zip((first, first + 1), cut, strict=True):
        at = dict(zip(own, extents, strict=True))
        shapes.append(tuple(at.get(axis, 1) for axis in range(ndim)))
    return cut, shapes


def transfers(
    grid: Grid, rank: int, blocks: Blocks, *, corners: bool
) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
    """Return the sends and the receives of `rank`; `ValueError` if faces do not match.

    Both in the order of `Grid.directions`, as the receiver sees them: between two ranks the sends
    of one are the receives of the other, in the same order. Ghosts without an owner are in none.
    `blocks`, by rank, may have only those of `rank` and of its neighbors.
    """
    directions = grid.directions(corners=corners)
    received = [_transfer(each, grid.neighbor(rank, each), rank, blocks) for each in directions]
    sent = [
        _transfer(each, rank, reader, blocks)
        for each in directions
        for reader in grid.readers(rank, each)
    ]
    return tuple(filter(None, sent)), tuple(filter(None, received))


def check(grid: Grid, blocks: Sequence[Block], *, corners: bool) -> None:
    """Raise the first error of `transfers` on any rank: the same one on every rank."""
    for rank, direction in product(range(prod(grid.dims)), grid.directions(corners=corners)):
        _transfer(direction, grid.neighbor(rank, direction), rank, blocks)


def start_of(grid: Grid, rank: int, blocks: Sequence[Block]) -> tuple[int, ...]:
    """Return how many cells come before a rank's own along each axis, on its line of ranks."""
    found = []
    for axis, extent in enumerate(grid.dims):
        stride = prod(grid.dims[axis + 1 :])
        before = range(rank - rank // stride % extent * stride, rank, stride)
        found.append(sum(blocks[each].extents[axis] for each in before))
    return tuple(found)


def interior(block: Block, sent: Iterable[Transfer], received: Iterable[Transfer]) -> Box:
    """Return the interior: a box of owned cells that need no neighbor, and that no neighbor needs.

    No transfer of `sent` reads them, and they are farther from the ghosts of `received` than these
    are wide. The box is maximal, unless an edge or a corner is read deeper than the faces beside
    it.
    """
    kept = block.owned
    apart = [(tuple(-step for step in each.direction), each.source) for each in sent]
    apart += [(each.direction, _beside(block, each.direction)) for each in received]
    for side, box in apart:
        spans = zip(kept.lower, box.lower, box.upper, kept.upper, strict=True)
        beyond = [
            kept.within(axis, *(span[2:] if step < 0 else span[:2]))
            for axis, (step, span) in enumerate(zip(side, spans, strict=True))
            if step
        ]
        kept = max(beyond, key=lambda box: box.size)
    return kept


def _beside(block: Block, direction: Direction) -> Box:
    """Return the owned cells as near to the ghosts on that side as these are wide."""
    spans = []
    for step, extent, (low, high) in zip(direction, block.extents, block.widths, strict=True):
        top = low + extent
        spans.append(((low, top), (max(low, top - high), top), (low, min(top, low + low)))[step])
    return Box(*zip(*spans, strict=True))


def shifted(box: tuple[Any, ...], axis: int, n: int, shapes: Sequence[Sequence[int]]) -> Index:
    """Return the index of a box that is moved by `n` cells along `axis` of fields of these shapes.

    Axes that `box` does not name are whole: the last ones, or the first ones where it begins with
    an Ellipsis. A box without cells along `axis` stays empty. `ValueError` if a cell leaves the
    fields, or if `axis` is not the same axis in all of them.
    """
    axis, n = index(axis), index(n)
    _require_box(box)
    from_last = box[:1] == (Ellipsis,)
    place, extent = _place_of(axis, shapes, from_last=from_last)
    # Up to the axis that is moved, all axes are named.
    whole = [slice(None)] * ((-place if from_last else place) + 1 - len(box))
    items = [*box[:1], *whole, *box[1:]] if from_last else [*box, *whole]
    items[place] = _moved(items[place], axis, n, extent)
    return tuple(items)


def _require_box(box: Any) -> None:
    cuts = (box[1:] if box[:1] == (Ellipsis,) else box) if isinstance(box, tuple) else (None,)
    if not all(isinstance(item, slice) for item in cuts):
        raise TypeError(f"box must be a tuple of slices, such as halo.interior, not {box!r}")


def _place_of(axis: int, shapes: Sequence[Sequence[int]], *, from_last: bool) -> tuple[int, int]:
    """Return the place of an axis in an index of all these fields, and their extent along it."""
    ndims = {len(shape) for shape in shapes}
    if not all(-ndim <= axis < ndim for ndim in ndims):
        raise ValueError(f"fields with {sorted(ndims)} axes have no axis {axis}")
    places = {axis % ndim - (ndim if from_last else 0) for ndim in ndims}
    extents = {shape[axis] for shape in shapes}
    if len(places) > 1 or len(extents) > 1:
        raise ValueError(
            f"axis {axis} is not the same in fields with {sorted(ndims)} axes: count it from the "
            f"{'last' if from_last else 'first'}, and among the axes that the grid cuts"
        )
    return places.pop(), extents.pop()


def _moved(cells: slice, axis: int, n: int, extent: int) -> slice:
    found = range(*cells.indices(extent))
    if found.step < 0:
        raise ValueError(f"box counts backwards along axis {axis}: {cells}")
    if not found:
        return slice(0, 0)
    start, stop = found[0] + n, found[-1] + 1 + n
    if start < 0 or stop > extent:
        raise ValueError(
            f"the box leaves the field: moved by {n} along axis {axis} it has the cells from "
            f"{start} up to before {stop}, the field has {extent}"
        )
    return slice(start, stop, cells.step)


def _transfer(
    direction: Direction, sender: int | None, receiver: int, blocks: Blocks
) -> Transfer | None:
    """Return the transfer between two ranks, None where there is none."""
    if sender is None:
        return None
    theirs, target = blocks[sender], blocks[receiver].ghosts(direction)
    shape = target.shape
    if any(step and not cells for step, cells in zip(direction, shape, strict=True)):
        return None
    first = []
    for axis, (step, cells) in enumerate(zip(direction, shape, strict=True)):
        extent = theirs.extents[axis]
        _require_match(axis, step, (sender, extent), (receiver, cells))
        first.append(theirs.widths[axis][0] + (extent - cells if step < 0 else 0))
    last = (begin + cells for begin, cells in zip(first, shape, strict=True))
    source = Box(tuple(first), tuple(last))
    return Transfer(direction, sender, receiver, source, target) if prod(shape) else None


def _require_match(
    axis: int, step: int, sender: tuple[int, int], receiver: tuple[int, int]
) -> None:
    """Raise unless the sender has the cells that a ghost region of the receiver needs.

    Both are a rank and its cells along an axis; `step` is that of the direction there.
    """
    (rank, extent), (needing, cells) = sender, receiver
    if step and cells > extent:
        raise ValueError(
            f"width {cells} along axis {axis} of the cart is too large: rank {needing} needs "
            f"{cells} cells of rank {rank}, which owns {extent} (its extent without ghosts). Take "
            "narrower ghosts, or fewer ranks along that axis, or "
            "NeighborExchange.from_global_ids, whose ghosts come from any ranks"
        )
    if not step and cells != extent:
        (one, ours), (other, others) = sorted([sender, receiver])
        raise ValueError(
            f"the faces of rank {one} and of its neighbor, rank {other}, do not match: along "
            f"axis {axis} of the cart they own {ours} and {others} cells (without ghosts). Shapes, "
            "widths and axes= of both ranks give these extents. Blocks that are no rows and "
            "columns of a grid can use NeighborExchange.from_global_ids"
        )

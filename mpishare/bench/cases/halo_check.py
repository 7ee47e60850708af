"""Fill what a halo exchange sends, spoil what it receives, and compare with what must be there.

What must be there is found from the coordinates alone, cell by cell, and not from the boxes that
the arms send: the owner is the rank in whose block the cell lies, the place is its place in there.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from mpishare.bench.pattern import POISON, word

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.bench.cases.halo_grid import Grid, Slices

#: Bits of a word that hold the place, see `mpishare.bench.pattern`.
_PLACE = 0xFFFF_FFFF


@dataclass(frozen=True)
class _Slab:
    """The ghosts on both sides of a cut and as many owned cells: all that an exchange touches.

    Attributes
    ----------
    cells, owned, ghosts : tuple of slice
        In a field: all of the slab, the cells to fill, the cells to spoil.
    words : array of uint64
        What the cells hold in step 0 of field 0.
    moves : array of uint64
        1 where the word goes with step and field, 0 where the poison must have stayed.
    fresh : array of uint64
        `words` of the cells to fill.
    """

    cells: Slices
    owned: Slices
    ghosts: Slices
    words: Any
    moves: Any
    fresh: Any


class Check:
    """Words for all fields of a `Grid`, told apart by owner, field, step and place.

    Local. Stream-ordered on CUDA: only `wrong` waits for the GPU. The arrays are made once for all
    arms of a size.
    """

    def __init__(self, grid: Grid) -> None:
        self._xp = grid.session.node.xp
        self._slabs = [_slab(grid, axis, high=high) for axis in grid.axes for high in (False, True)]
        shapes = {slab.words.shape for slab in self._slabs}
        self._expected = {shape: self._xp.empty(shape, "u8") for shape in shapes}
        self._differs = {shape: self._xp.empty(shape, bool) for shape in shapes}
        self._wrong = self._xp.zeros((), "i8")
        # Every kernel is loaded here: loading one later waits for whatever the stream waits for.
        self.fill(grid.fields, 0)
        self.poison(grid.fields)
        self.count(grid.fields, 0)
        self.wrong()

    def fill(self, fields: Sequence[Any], token: int) -> None:
        """Write what this rank sends in step `token`."""
        for number, field in enumerate(fields):
            step = self._xp.uint64(word(0, number, token))
            for slab in self._slabs:
                self._xp.add(slab.fresh, step, out=field.view("u8")[slab.owned])

    def poison(self, fields: Sequence[Any]) -> None:
        """Overwrite all ghosts, those too that no exchange may write."""
        for field in fields:
            for slab in self._slabs:
                field.view("u8")[slab.ghosts].fill(self._xp.uint64(POISON))

    def count(self, fields: Sequence[Any], token: int) -> None:
        """Add to `wrong` how many ghosts and cells beside them are not those of step `token`."""
        xp = self._xp
        for number, field in enumerate(fields):
            step = xp.uint64(word(0, number, token))
            for slab in self._slabs:
                shape = slab.words.shape
                expected, differs = self._expected[shape], self._differs[shape]
                xp.multiply(slab.moves, step, out=expected)
                xp.add(expected, slab.words, out=expected)
                xp.not_equal(field.view("u8")[slab.cells], expected, out=differs)
                self._wrong += xp.count_nonzero(differs)

    def wrong(self) -> int:
        """Return how many words were wrong since the last call; waits for the GPU."""
        wrong = int(self._wrong)
        self._wrong.fill(0)
        return wrong


def _slab(grid: Grid, axis: int, *, high: bool) -> _Slab:
    xp = grid.session.node.xp
    n, w = grid.n, grid.width
    rest = [slice(None)] * (len(grid.shape) - grid.naxes)
    inner = [slice(w, w + n)] * grid.naxes
    outer = [slice(None)] * grid.naxes
    first = n if high else 0

    def at(spans: list[slice], start: int, count: int) -> Slices:
        return (*spans[:axis], slice(start, start + count), *spans[axis + 1 :], *rest)

    shape = list(grid.shape)
    shape[axis] = 2 * w
    words = xp.full(tuple(shape), xp.uint64(POISON), "u8")
    moves = xp.zeros(tuple(shape), "u8")
    for direction in product((-1, 0, 1), repeat=grid.naxes):
        if sum(map(abs, direction)) > 1 and not grid.corners:
            continue
        spans = [range(n + 2 * w)[_span(step, n, w)] for step in direction]
        spans[axis] = range(max(spans[axis].start, first), min(spans[axis].stop, first + 2 * w))
        if not len(spans[axis]):
            continue
        box = [slice(span.start, span.stop) for span in spans]
        box[axis] = slice(spans[axis].start - first, spans[axis].stop - first)
        key = (*box, *rest)
        words[key] = _places(grid, spans) + xp.uint64(word(grid.rank_at(direction), 0, 0))
        moves[key] = 1
    own = at(inner, 0 if high else w, w)
    return _Slab(
        cells=at(outer, first, 2 * w),
        owned=at(inner, n if high else w, w),
        ghosts=at(outer, n + w if high else 0, w),
        words=words,
        moves=moves,
        fresh=xp.ascontiguousarray(words[own]),
    )


def _places(grid: Grid, spans: Sequence[range]) -> Any:
    """Return the places in their owner's block of the cells in these spans of a field."""
    xp = grid.session.node.xp
    cut = [(xp.arange(each.start, each.stop) - grid.width) % grid.n for each in spans]
    uncut = [xp.arange(extent) for extent in grid.shape[grid.naxes :]]
    place = xp.zeros((), "i8")
    for axis, found in enumerate([*cut, *uncut]):
        extent = grid.n if axis < grid.naxes else grid.shape[axis]
        along = [1] * len(grid.shape)
        along[axis] = -1
        place = place * extent + found.reshape(along)
    return (place & _PLACE).astype("u8")


def _span(step: int, n: int, width: int) -> slice:
    """Return the cells of a field on that side of the block; 0: in it."""
    return (slice(width, width + n), slice(width + n, n + 2 * width), slice(0, width))[step]

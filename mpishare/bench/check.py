"""Words that identify their owner, side or field, step and place, so that a stray one is seen.

`Pattern` checks whole arrays, `HaloCheck` the ghosts of blocks. What these must hold is found from
the coordinates of each cell, not from the boxes that the variants send: the owner is the rank in
whose block the cell lies, the place is its place in there.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.bench.grid import Grid, Slices


#: A word that no pattern has: what a copy must overwrite is filled with it.
POISON = 0xFFFF_FFFF_FFFF_FFFF


def word(owner: int, side: int, step: int) -> int:
    """Return the first word of a face: 15 bits of owner, 4 of side, 12 of step, 32 of place."""
    return (owner & 0x7FFF) << 48 | (side & 0xF) << 44 | (step & 0xFFF) << 32


class _WrongWords:
    """Counts the words that differ from what they should be."""

    def __init__(self, xp: Any) -> None:
        self._xp = xp
        self._wrong = xp.zeros((), "i8")

    def _compare(self, got: Any, expected: Any, differs: Any) -> None:
        self._xp.not_equal(got, expected, out=differs)
        self._wrong += self._xp.count_nonzero(differs)

    def wrong(self) -> int:
        """Return how many words were wrong since the last call; waits for the GPU."""
        wrong = int(self._wrong)
        self._wrong.fill(0)
        return wrong


class Pattern(_WrongWords):
    """Fill arrays of `count` 64-bit words, and count the words that are not what they should be.

    Stream-ordered on CUDA: only `wrong` waits for the GPU.
    """

    def __init__(self, xp: Any, count: int) -> None:
        super().__init__(xp)
        self._place = xp.arange(count, dtype="u8")
        self._expected = xp.empty(count, "u8")
        self._differs = xp.empty(count, bool)
        # Load all kernels now: loading one later waits for whatever the stream waits for.
        self.fill(self._expected, 0, 0, 0)
        self.poison(self._expected)
        self.verify(self._expected, 0, 0, 0)
        self.wrong()

    def fill(self, out: Any, owner: int, side: int, step: int) -> None:
        self._xp.add(self._place, self._xp.uint64(word(owner, side, step)), out=out)

    def poison(self, out: Any) -> None:
        out.fill(self._xp.uint64(POISON))

    def verify(self, got: Any, owner: int, side: int, step: int) -> None:
        self.fill(self._expected, owner, side, step)
        self._compare(got, self._expected, self._differs)


#: The bits of a word that hold the place.
_PLACE = 0xFFFF_FFFF


@dataclass(frozen=True)
class _Band:
    """The ghosts at one side of an axis and as many owned cells: all that an exchange touches."""

    cells: Slices  # in a field: the whole band, the cells to fill, the cells to poison
    owned: Slices
    ghosts: Slices
    words: Any  # what the cells hold in step 0 of field 0
    moves: Any  # 1 where the word depends on step and field, 0 where the poison must have stayed
    fresh: Any  # `words` of the cells to fill


class HaloCheck(_WrongWords):
    """Words for all fields of a `Grid`, which identify owner, field, step and place.

    Stream-ordered on CUDA: only `wrong` waits for the GPU. The arrays are made once for all
    variants of a size.
    """

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid.session.node.xp)
        self._bands = [_band(grid, axis, high=high) for axis in grid.axes for high in (False, True)]
        shapes = {band.words.shape for band in self._bands}
        self._expected = {shape: self._xp.empty(shape, "u8") for shape in shapes}
        self._differs = {shape: self._xp.empty(shape, bool) for shape in shapes}
        # Load all kernels now: loading one later waits for whatever the stream waits for.
        self.fill(grid.fields, 0)
        self.poison(grid.fields)
        self.verify(grid.fields, 0)
        self.wrong()

    def fill(self, fields: Sequence[Any], token: int) -> None:
        for number, field in enumerate(fields):
            step = self._xp.uint64(word(0, number, token))
            for band in self._bands:
                self._xp.add(band.fresh, step, out=field.view("u8")[band.owned])

    def poison(self, fields: Sequence[Any]) -> None:
        for field in fields:
            for band in self._bands:
                field.view("u8")[band.ghosts].fill(self._xp.uint64(POISON))

    def verify(self, fields: Sequence[Any], token: int) -> None:
        xp = self._xp
        for number, field in enumerate(fields):
            step = xp.uint64(word(0, number, token))
            for band in self._bands:
                shape = band.words.shape
                expected, differs = self._expected[shape], self._differs[shape]
                xp.multiply(band.moves, step, out=expected)
                xp.add(expected, band.words, out=expected)
                self._compare(field.view("u8")[band.cells], expected, differs)


def _band(grid: Grid, axis: int, *, high: bool) -> _Band:
    xp = grid.session.node.xp
    n, w = grid.n, grid.width
    rest = [slice(None)] * (len(grid.shape) - grid.naxes)
    inner = [slice(w, w + n)] * grid.naxes
    outer = [slice(None)] * grid.naxes
    first = n if high else 0
    # Indexed by the step along an axis; -1 is the last.
    by_step = (slice(w, w + n), slice(w + n, n + 2 * w), slice(0, w))

    def at(spans: list[slice], start: int, count: int) -> Slices:
        return (*spans[:axis], slice(start, start + count), *spans[axis + 1 :], *rest)

    shape = list(grid.shape)
    shape[axis] = 2 * w
    words = xp.full(tuple(shape), xp.uint64(POISON), "u8")
    moves = xp.zeros(tuple(shape), "u8")
    for direction in product((-1, 0, 1), repeat=grid.naxes):
        if sum(map(abs, direction)) > 1 and not grid.corners:
            continue
        spans = [range(n + 2 * w)[by_step[step]] for step in direction]
        spans[axis] = range(max(spans[axis].start, first), min(spans[axis].stop, first + 2 * w))
        if not len(spans[axis]):
            continue
        box = [slice(span.start, span.stop) for span in spans]
        box[axis] = slice(spans[axis].start - first, spans[axis].stop - first)
        key = (*box, *rest)
        words[key] = _places(grid, spans) + xp.uint64(word(grid.rank_at(direction), 0, 0))
        moves[key] = 1
    own = at(inner, 0 if high else w, w)
    return _Band(
        cells=at(outer, first, 2 * w),
        owned=at(inner, n if high else w, w),
        ghosts=at(outer, n + w if high else 0, w),
        words=words,
        moves=moves,
        fresh=xp.ascontiguousarray(words[own]),
    )


def _places(grid: Grid, spans: Sequence[range]) -> Any:
    """Return for the cells in these spans of a field their places in the block of their owner."""
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

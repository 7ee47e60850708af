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


class Tally:
    """Counts wrong words; on CUDA only `wrong` waits for the GPU."""

    def __init__(self, xp: Any) -> None:
        self._xp = xp
        self._wrong = xp.zeros((), "i8")

    def add(self, wrong: Any) -> None:
        self._wrong += wrong

    def compare(self, got: Any, expected: Any, differs: Any) -> None:
        self._xp.not_equal(got, expected, out=differs)
        self.add(self._xp.count_nonzero(differs))

    def wrong(self) -> int:
        wrong = int(self._wrong)
        self._wrong.fill(0)
        return wrong


class Pattern(Tally):
    """Fill arrays of `count` 64-bit words, and count those that are not what they should be."""

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
        self.compare(got, self._expected, self._differs)


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


class HaloCheck(Tally):
    """Words for all fields of a `Grid`, made once for all variants of a size."""

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
                self.compare(field.view("u8")[band.cells], expected, differs)


def _band(grid: Grid, axis: int, *, high: bool) -> _Band:
    xp, n, w, naxes = grid.session.node.xp, grid.n, grid.width, grid.naxes
    rest = [slice(None)] * (len(grid.shape) - naxes)

    def at(span: slice, others: slice) -> Slices:
        return (*[others] * axis, span, *[others] * (naxes - 1 - axis), *rest)

    band = slice(n, n + 2 * w) if high else slice(0, 2 * w)
    words, moves = _words(grid, at(band, slice(None)))
    inner = slice(w, w + n)
    own = at(slice(0, w) if high else slice(w, 2 * w), inner)
    return _Band(
        cells=at(band, slice(None)),
        owned=at(slice(n, n + w) if high else slice(w, 2 * w), inner),
        ghosts=at(slice(n + w, n + 2 * w) if high else slice(0, w), slice(None)),
        words=words,
        moves=moves,
        fresh=xp.ascontiguousarray(words[own]),
    )


def _words(grid: Grid, cells: Slices) -> tuple[Any, Any]:
    """Return the words of these cells from their coordinates, and 1 where they are exchanged."""
    xp, n, w = grid.session.node.xp, grid.n, grid.width
    # Along each axis the step to the owner, -1, 0 or 1; of all axes the owner as a number in base
    # 3, how many of the steps are not 0, and the place in the owner's block.
    owner = away = place = xp.zeros((), "i8")
    for axis, extent in enumerate(grid.shape):
        along = [1] * len(grid.shape)
        along[axis] = -1
        at = xp.arange(extent)[cells[axis]].reshape(along)
        if axis >= grid.naxes:
            place = place * extent + at
            continue
        step = (at >= n + w).astype("i8") - (at < w).astype("i8")
        owner, away = 3 * owner + step + 1, away + abs(step)
        place = place * n + (at - w) % n
    owners = [grid.rank_at(steps) for steps in product((-1, 0, 1), repeat=grid.naxes)]
    words = xp.take(xp.asarray([word(rank, 0, 0) for rank in owners], "u8"), owner)
    words = words + (place & _PLACE).astype("u8")
    moves = xp.zeros(words.shape, "u8")
    moves[...] = (away <= 1) | grid.corners
    words[moves == 0] = xp.uint64(POISON)
    return words, moves

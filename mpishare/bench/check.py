"""Words that identify their owner, side or field, step and index, so that a stray one is seen.

`Check` is for the fields of an exchange, in parts; those of a halo are made by `halo_check`. What
ghosts must hold is found from the coordinates of each cell, not from the boxes that the variants
send: the owner is the rank in whose block the cell lies, the index is that of the cell in there.
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
    """Return the first word of a face: 15 bits of owner, 4 of side, 12 of step, 32 of index."""
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


@dataclass(frozen=True)
class Part:
    """Cells of a field, and the words that they hold in step 0."""

    field: int
    cells: Any  # their index in the field, as words
    words: Any
    number: int = 0  # added to the words, as their side
    moves: Any = None  # where given: 0 for the words that are the same in every step


class Check(Tally):
    """The words that leave with a step, and those that arrive; all variants of a size share it.

    `poisoned` are cells, by the number of their field, that an exchange must overwrite.
    """

    def __init__(
        self,
        xp: Any,
        fields: Sequence[Any],
        sent: Sequence[Part],
        received: Sequence[Part],
        poisoned: Sequence[tuple[int, Any]],
    ) -> None:
        super().__init__(xp)
        self._sent, self._received, self._poisoned = sent, received, poisoned
        shapes = {part.words.shape for part in received}
        self._expected = {shape: xp.empty(shape, "u8") for shape in shapes}
        self._differs = {shape: xp.empty(shape, bool) for shape in shapes}
        # Load all kernels now: loading one later waits for whatever the stream waits for.
        self.fill(fields, 0)
        self.poison(fields)
        self.verify(fields, 0)
        self.wrong()

    def fill(self, fields: Sequence[Any], token: int) -> None:
        for part in self._sent:
            step = self._xp.uint64(word(0, part.number, token))
            self._xp.add(part.words, step, out=fields[part.field].view("u8")[part.cells])

    def poison(self, fields: Sequence[Any]) -> None:
        for field, cells in self._poisoned:
            fields[field].view("u8")[cells].fill(self._xp.uint64(POISON))

    def verify(self, fields: Sequence[Any], token: int) -> None:
        xp = self._xp
        for part in self._received:
            shape = part.words.shape
            expected, step = self._expected[shape], xp.uint64(word(0, part.number, token))
            if part.moves is None:
                xp.add(part.words, step, out=expected)
            else:
                xp.multiply(part.moves, step, out=expected)
                xp.add(expected, part.words, out=expected)
            got = fields[part.field].view("u8")[part.cells]
            self.compare(got, expected, self._differs[shape])


#: The bits of a word that hold the index.
_INDEX = 0xFFFF_FFFF


def halo_check(grid: Grid) -> Check:
    """Return the check of all fields of a grid."""
    sent, received, poisoned = [], [], []
    for axis in grid.axes:
        for high in (False, True):
            band, owned, ghosts, fresh = _band(grid, axis, high=high)
            words, moves = _words(grid, band)
            first = grid.session.node.xp.ascontiguousarray(words[fresh])
            for k in range(grid.count):
                sent.append(Part(k, owned, first, k))
                received.append(Part(k, band, words, k, moves))
                poisoned.append((k, ghosts))
    return Check(grid.session.node.xp, grid.fields, sent, received, poisoned)


def _band(grid: Grid, axis: int, *, high: bool) -> tuple[Slices, ...]:
    """Return the cells that an exchange touches at one side of an axis: ghosts, as many owned ones.

    Then which of them are filled, which are poisoned, and where the first lie among all.
    """
    n, w = grid.n, grid.width
    rest = [slice(None)] * (len(grid.shape) - grid.naxes)

    def at(span: slice, others: slice) -> Slices:
        return (*[others] * axis, span, *[others] * (grid.naxes - 1 - axis), *rest)

    every, inner = slice(None), slice(w, w + n)
    low, second = slice(0, w), slice(w, 2 * w)
    if high:
        ghosts = at(slice(n + w, n + 2 * w), every)
        return at(slice(n, n + 2 * w), every), at(slice(n, n + w), inner), ghosts, at(low, inner)
    return at(slice(0, 2 * w), every), at(second, inner), at(low, every), at(second, inner)


def _words(grid: Grid, cells: Slices) -> tuple[Any, Any]:
    """Return the words of these cells from their coordinates, and 1 where they are exchanged."""
    xp, n, w = grid.session.node.xp, grid.n, grid.width
    # Along each axis the step to the owner, -1, 0 or 1; of all axes the owner as a number in base
    # 3, how many of the steps are not 0, and the index in the owner's block.
    owner = away = index = xp.zeros((), "i8")
    spans = zip(grid.shape, cells, strict=True)
    along = xp.ix_(*(xp.arange(extent)[span] for extent, span in spans))
    for axis, (extent, at) in enumerate(zip(grid.shape, along, strict=True)):
        if axis >= grid.naxes:
            index = index * extent + at
            continue
        step = (at >= n + w).astype("i8") - (at < w).astype("i8")
        owner, away = 3 * owner + step + 1, away + abs(step)
        index = index * n + (at - w) % n
    owners = [grid.rank_at(steps) for steps in product((-1, 0, 1), repeat=grid.naxes)]
    words = xp.take(xp.asarray([word(rank, 0, 0) for rank in owners], "u8"), owner)
    words = words + (index & _INDEX).astype("u8")
    moves = xp.zeros(words.shape, "u8")
    moves[...] = (away <= 1) | grid.corners
    words[moves == 0] = xp.uint64(POISON)
    return words, moves

"""Chunks of parts whose cells lie in another order at the other end: the receiver transposes them.

Such a chunk is a box, long along the axis that is fastest at the sender and along the one that is
fastest at the receiver. It is packed in the sender's order, as any other cells. The receiver's
kernel takes it through shared memory in tiles, which it reads along the one axis and stores along
the other (tiles.cuh).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from math import prod
from operator import sub
from typing import TYPE_CHECKING, NamedTuple

from mpishare.plans.cells import Box
from mpishare.plans.exchange.cuda.records import AXES
from mpishare.plans.exchange.cuda.strided import StridedCells
from mpishare.plans.layout import FieldLayout
from mpishare.plans.message import Part

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_TILE_NBYTES = 32 << 10
# Cells along an axis of a tile at most: as many as the threads of the smallest block.
_MAX_CELLS = 256
# Shorter runs of bytes at either end fill no sector of memory.
_SECTOR_NBYTES = 32


class End(NamedTuple):
    """A part at one of its ends, with the axes of its chunks alone: the others have one cell."""

    first: int  # offset of the first cell in bytes
    shape: tuple[int, ...]
    layout: FieldLayout

    @classmethod
    def of(cls, part: Part, layout: FieldLayout, order: Sequence[int]) -> End:
        cells = part.cells(layout)
        shape, strides = (tuple(each[at] for at in order) for each in (cells.shape, cells.strides))
        return cls(cells.offset, shape, FieldLayout(shape, strides, layout.dtype, layout.device))


class Chunk(NamedTuple):
    """A box of a part, packed from byte `begin` of the part on."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    begin: int

    def cells(self, end: End) -> StridedCells:
        """Return the cells with an axis for each of the chunk's, in units of an element."""
        strides = end.layout.strides
        first = end.first + sum(at * step for at, step in zip(self.start, strides, strict=True))
        return StridedCells(first, [*self.shape], [*strides], -1, end.layout.dtype.itemsize)

    def wide_cells(self, end: End, alignment: int) -> StridedCells:
        """Return the cells in units as wide as both they and their packed form allow."""
        first = self.cells(end).first
        both = first | self.begin | alignment
        part = Part.of_box(0, end.layout, Box((0,) * len(self.shape), self.shape))
        return replace(StridedCells.of(part, end.layout, both & -both), first=first)

    def log_tile(self, itemsize: int) -> tuple[int, int]:
        """Return the logarithms of the rows and columns of its tiles."""
        return _log_tile(self.shape, itemsize, _TILE_NBYTES)


def travel_order(part: Part, sender: FieldLayout, receiver: FieldLayout) -> tuple[int, ...]:
    """Return the axes of such a part in the order in which its chunks travel; () for other parts.

    The layouts have the axes that travel; those of the receiver may run backwards.
    The last is the sender's fastest, the one before the receiver's. Same at both ends.
    """
    size, shape = sender.dtype.itemsize, part.shape
    axes = [axis for axis, extent in enumerate(shape) if extent > 1]
    # Where places were named, the other end may have no box.
    if (
        part.axis is not None
        or part.slide is not None
        or size & (size - 1)
        or not 2 <= len(axes) <= AXES
    ):
        return ()
    column, row = (_fastest(axes, layout) for layout in (sender, receiver))
    are_runs = sender.strides[column] == abs(receiver.strides[row]) == size
    if column == row or not are_runs or min(shape[row], shape[column]) * size < _SECTOR_NBYTES:
        return ()
    axes.remove(row)
    axes.remove(column)
    return (*axes, row, column)


def _fastest(axes: Sequence[int], layout: FieldLayout) -> int:
    return min(axes, key=lambda axis: abs(layout.strides[axis]))


def chunks_of(shape: tuple[int, ...], itemsize: int, step: int, most: int) -> Iterator[Chunk]:
    """Yield `most` chunks at most, of about `step` bytes. Same at both ends."""
    rows, columns = _log_tile(shape, itemsize, min(step, _TILE_NBYTES))
    wanted = [1] * (len(shape) - 2) + [min(shape[-2], 1 << rows), min(shape[-1], 1 << columns)]

    def is_small() -> bool:
        counts = (-(-whole // each) for whole, each in zip(shape, wanted, strict=True))
        return prod(wanted) * itemsize < step or prod(counts) > most

    while is_small() and tuple(wanted) != shape:
        axis = max(axis for axis, extent in enumerate(shape) if wanted[axis] < extent)
        wanted[axis] = min(2 * wanted[axis], shape[axis])
    begin = 0
    for place in product(*map(_cuts, shape, wanted)):
        start, stop = zip(*place, strict=True)
        chunk = Chunk(start, tuple(map(sub, stop, start)), begin)
        yield chunk
        begin += prod(chunk.shape) * itemsize


def _cuts(extent: int, wanted: int) -> list[tuple[int, int]]:
    """Return begin and end of about equal pieces of an axis, none longer than wanted."""
    count = -(-extent // wanted)
    return [*pairwise(extent * at // count for at in range(count + 1))]


def _log_tile(shape: Sequence[int], itemsize: int, nbytes: int) -> tuple[int, int]:
    """Return the logarithms of the rows and columns of tiles of so many bytes at most."""
    rows, columns = ((min(extent, _MAX_CELLS) - 1).bit_length() for extent in shape[-2:])
    cells = (nbytes // itemsize).bit_length() - 1
    rows = min(rows, cells - min(columns, cells - cells // 2))
    return rows, min(columns, cells - rows)

"""Boxes of cells: on a GPU updated in one launch, by NumPy piece by piece."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Box = tuple[slice, ...]
    Array = Any  # numpy.ndarray or cupy.ndarray

HERE = Path(__file__).parent
THREADS = 256
PIECE = 16384  # cells


def shifted(box: Box, axis: int, cells: int) -> Box:
    """Move a box along an axis."""
    moved = slice(box[axis].start + cells, box[axis].stop + cells)
    return (*box[:axis], moved, *box[axis + 1 :])


def grown(box: Box) -> Box:
    """Add the cells around a box, edges and corners too."""
    return tuple(slice(s.start - 1, s.stop + 1) for s in box)


def pieces(box: Box) -> Iterator[Box]:
    """Cut a box along the first axis."""
    rows = max(1, PIECE // math.prod(s.stop - s.start for s in box[1:]))
    for start in range(box[0].start, box[0].stop, rows):
        yield (slice(start, min(start + rows, box[0].stop)), *box[1:])


class Boxes:
    """Boxes of a field that are updated together: on a GPU in one launch, by NumPy in pieces.

    Iterating gives the pieces; one stays in the cache while operation after operation goes over it.
    """

    def __init__(self, xp: Any, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
        exact = [
            tuple(slice(*s.indices(n)[:2]) for s, n in zip(b, shape, strict=True)) for b in boxes
        ]
        self._boxes = [box for box in exact if all(s.start < s.stop for s in box)]
        if xp is np:
            self._boxes = [piece for box in self._boxes for piece in pieces(box)]
            return
        if math.prod(shape) >= 2**31:
            raise ValueError("the kernels count cells in 32 bits: take a smaller --n")
        is_flat = len(shape) == 2
        self._plane, self._row = (shape[1], 0) if is_flat else (shape[1] * shape[2], shape[2])
        self._cells = 0
        records = []
        for box in self._boxes:
            extents = [s.stop - s.start for s in box]
            self._cells += math.prod(extents)
            first = int(np.ravel_multi_index([s.start for s in box], shape))
            records.append((self._cells, 1 if is_flat else extents[1], extents[-1], first))
        self._records = xp.asarray(np.array(records, np.int32))

    def __iter__(self) -> Iterator[Box]:
        return iter(self._boxes)

    def launch(self, kernel: Any, arrays: Sequence[Array], *scalars: Any) -> None:
        """Put a kernel that begins like those in `boxes.cu` on the current stream."""
        if self._cells:
            sizes = (np.int32(self._cells), np.int32(self._plane), np.int32(self._row))
            blocks = -(-self._cells // THREADS)
            kernel((blocks,), (THREADS,), (*arrays, self._records, *sizes, *scalars))


def source(name: str) -> str:
    """Return the CUDA source of an example."""
    return (HERE / "boxes.cu").read_text() + (HERE / f"{name}.cu").read_text()


def kernels(xp: Any, name: str, *names: str) -> tuple[Any, ...]:
    """Compile kernels of an example; none on NumPy."""
    if xp is np:
        return tuple(None for _ in names)
    module = xp.RawModule(code=source(name), options=("--std=c++17", "--fmad=false"))
    return tuple(module.get_function(each) for each in names)

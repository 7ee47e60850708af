"""Boxes of cells: on a GPU updated in one launch, by NumPy piece by piece."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import mpishare

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Box = tuple[slice, ...]
    Array = Any  # numpy.ndarray or cupy.ndarray

HERE = Path(__file__).parent
THREADS = 256
LANES = 5  # 32 threads at most are side by side: a warp
LINE = 128  # bytes that GPU memory moves best
PIECE = 16384  # cells
RECORD = np.dtype([("steps", np.int32, 2), ("boxes", np.int32, (6, 9))])  # as in boxes.cu


def fields(
    node: mpishare.Node, shape: Sequence[int], dtype: Any, signals: int = 0
) -> tuple[mpishare.Window, list[Array]]:
    """Return two fields of zeros that all ranks map, and the window that they are in. Collective.

    On GPUs owned rows begin lines, that is, every row's second cell does; NumPy's arrays are laid
    out the same.
    """
    cells = LINE // np.dtype(dtype).itemsize
    pitch = -(-(cells - 1 + shape[-1]) // cells) * cells
    window = node.allocate_each((2, *shape[:-1], pitch), dtype, fill=0, signals=signals)
    return window, [each[..., cells - 1 : cells - 1 + shape[-1]] for each in window.array]


def shifted(box: Box, axis: int, cells: int) -> Box:
    """Move a box along an axis."""
    moved = slice(box[axis].start + cells, box[axis].stop + cells)
    return (*box[:axis], moved, *box[axis + 1 :])


def in_lines(inner: Box, owned: Box, cells: int) -> Box:
    """Shrink a box of owned cells where it cuts rows, to lines of this many cells.

    So no line is updated by two launches. The rest of it costs the shell nothing: memory moves
    whole lines.
    """
    row, mine = owned[-1], inner[-1]
    begin, stop = mine.start - row.start, mine.stop - row.start
    begin = min(-(-begin // cells) * cells, row.stop - row.start)
    if mine.stop < row.stop:
        stop = stop // cells * cells
    return (*inner[:-1], slice(row.start + begin, row.start + max(begin, stop)))


def outside(owned: Box, inner: Box) -> list[Box]:
    """Return disjoint boxes: the cells of `owned` that are not in `inner`."""
    found = []
    for axis, (whole, part) in enumerate(zip(owned, inner, strict=True)):
        for rest in (slice(whole.start, part.start), slice(part.stop, whole.stop)):
            found.append((*inner[:axis], rest, *owned[axis + 1 :]))
    return found


def pieces(box: Box) -> Iterator[Box]:
    """Cut a box along the first axis."""
    rows = max(1, PIECE // math.prod(s.stop - s.start for s in box[1:]))
    for start in range(box[0].start, box[0].stop, rows):
        yield (slice(start, min(start + rows, box[0].stop)), *box[1:])


def lanes_for(groups: int) -> int:
    """Return the binary logarithm of how many threads are side by side in rows of so many groups.

    A whole warp, or half of one where fewer threads are left without a group then.
    """
    most = min((groups - 1).bit_length(), LANES)
    least = LANES - 1 if most == LANES else most
    return min((most, least), key=lambda lanes: -(-groups >> lanes) << lanes)


class Boxes:
    """Boxes of a field that are updated together: on a GPU in one launch, by NumPy in pieces.

    Iterating gives the pieces; one stays in the cache while operation after operation goes over it.

    Parameters
    ----------
    xp : module
        CuPy or NumPy.
    like : array
        Any array of the field's layout, of two or three axes, with one ghost on each side.
    boxes : sequence of tuple of slice
        Disjoint.
    group : int
        Cells that a thread takes at once, as in the kernel.
    march : int
        Groups at most of a thread, one behind the other along the first axis: many save what is
        read again, few bring more threads to work on small boxes.
    """

    def __init__(
        self, xp: Any, like: Array, boxes: Sequence[Box], *, group: int = 1, march: int = 1
    ) -> None:
        exact = [
            tuple(slice(*s.indices(n)[:2]) for s, n in zip(b, like.shape, strict=True))
            for b in boxes
        ]
        self._boxes = [box for box in exact if all(s.start < s.stop for s in box)]
        if xp is np:
            self._boxes = [piece for box in self._boxes for piece in pieces(box)]
            return
        steps = [step // like.itemsize for step in like.strides]
        if steps[0] * like.shape[0] >= 2**31:
            raise ValueError("the kernels count cells in 32 bits: take fewer")
        record = np.zeros(1, RECORD)
        record["steps"] = steps[0], steps[1] if len(steps) == 3 else 0
        self._blocks = 0
        for number, box in enumerate(self._boxes):
            depth, *middle, columns = (s.stop - s.start for s in box)
            rows = middle[0] if middle else 1
            skip = (box[-1].start - 1) % group
            groups = -(-(skip + columns) // group)
            lanes = lanes_for(groups)
            tiles, lines = -(-groups >> lanes), rows * -(-depth // march)
            self._blocks += tiles * -(-lines // (THREADS >> lanes))
            first = sum(s.start * step for s, step in zip(box, steps, strict=True)) - skip
            it = self._blocks, lanes, tiles, rows, depth, march, first, skip, skip + columns
            record["boxes"][0, number] = it
        # CuPy passes one element by value; one with fields it would describe anew at each launch.
        self._record = record.view(f"V{RECORD.itemsize}")

    def __iter__(self) -> Iterator[Box]:
        return iter(self._boxes)

    def launch(self, kernel: Any, arrays: Sequence[Array], *scalars: Any) -> None:
        """Put a kernel that begins like those in `boxes.cu` on the current stream."""
        if self._blocks:
            kernel((self._blocks,), (THREADS,), (*arrays, self._record, *scalars))


def source(name: str) -> str:
    """Return the CUDA source of an application."""
    return (HERE / "boxes.cu").read_text() + (HERE / f"{name}.cu").read_text()


def kernels(xp: Any, name: str, *names: str) -> tuple[Any, ...]:
    """Compile kernels of an application; none on NumPy."""
    if xp is np:
        return tuple(None for _ in names)
    options = ("--std=c++17", "--fmad=false", *mpishare.device.include())
    module = xp.RawModule(code=source(name), options=options)
    # What a RawKernel launches; it would look for the current device's at each launch.
    return tuple(module.get_function(each).kernel for each in names)

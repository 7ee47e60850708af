"""Pack what all sides of all fields send into one buffer, and unpack what they receive. CUDA only.

One kernel each way, whatever the number of sides and fields: what any rival is given that moves
contiguous words alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.bench.cases.halo_grid import Grid, Slices

_WORD = 8
_BLOCK = 256
#: Blocks a box: enough of them to fill a GPU, and each loops from there.
_MOST_BLOCKS = 1024
_AXES = 3


def box_row(address: int, strides: Sequence[int], cells: Slices, first: int) -> list[int]:
    """Return a box as the kernels have it: its first cell, its place, extents and strides.

    Local.

    Parameters
    ----------
    address : int
        Of the field.
    strides : sequence of int, bytes
        Of the field, 3 axes at most.
    cells : tuple of slice
        The box, with begin and end in every axis.
    first : int, words
        Where its words are in the buffer.
    """
    extents = [span.stop - span.start for span in cells]
    for span, stride in zip(cells, strides, strict=True):
        address += span.start * stride
    missing = _AXES - len(extents)
    steps = [stride // _WORD for stride in strides]
    return [address, first, *[1] * missing, *extents, *[0] * missing, *steps]


class Packing:
    """The boxes of a grid's sides, side by side and there field by field.

    Local. Loads both kernels: later that would wait for whatever the stream waits for.

    Attributes
    ----------
    ends : list of int, words
        Where each side ends in the buffer.
    total : int, words
        Of the buffer.
    """

    def __init__(self, grid: Grid, fields: Sequence[Any]) -> None:
        xp = grid.session.node.xp
        counts = [grid.count * grid.size(side) for side in grid.sides]
        self.ends: list[int] = np.cumsum(counts).tolist()
        self.total = self.ends[-1]
        self._fields = tuple(fields)  # the kernels know addresses only
        self._sources = self._table(grid, [side.source for side in grid.sides])
        self._targets = self._table(grid, [side.target for side in grid.sides])
        module = xp.RawModule(code=Path(__file__).with_name("pack.cu").read_text())
        self._pack, self._unpack = module.get_function("pack"), module.get_function("unpack")
        blocks = min(-(-max(counts) // (grid.count * _BLOCK)), _MOST_BLOCKS)
        self._launch = (blocks, len(grid.sides) * grid.count), (_BLOCK,)
        scratch = xp.zeros(self.total, "u8")
        self.pack(scratch)
        self.unpack(scratch)
        grid.session.synchronize()

    def _table(self, grid: Grid, boxes: Sequence[Slices]) -> Any:
        rows, first = [], 0
        for box in boxes:
            spans = [span.indices(n) for span, n in zip(box, grid.shape, strict=True)]
            cells = tuple(slice(start, stop) for start, stop, _ in spans)
            for field in self._fields:
                rows.append(box_row(int(field.data.ptr), field.strides, cells, first))
                first += int(np.prod([span.stop - span.start for span in cells]))
        return grid.session.node.xp.asarray(np.array(rows, "i8"))

    def pack(self, buffer: Any) -> None:
        """Write what leaves into `buffer`. Stream-ordered."""
        self._pack(*self._launch, (buffer, self._sources))

    def unpack(self, buffer: Any) -> None:
        """Write `buffer` into the ghosts. Stream-ordered."""
        self._unpack(*self._launch, (buffer, self._targets))

    def split(self, buffer: Any) -> list[Any]:
        """Return the views of `buffer` that hold the words of each side. Local."""
        return [buffer[a:b] for a, b in zip([0, *self.ends], self.ends, strict=False)]

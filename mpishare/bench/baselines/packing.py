"""Pack what all sides of all fields send into one buffer, and unpack what they receive. CUDA only.

One kernel each way, whatever the number of sides and fields: for every baseline that moves
contiguous words alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.bench.problems.exchange import Problem

_WORD = 8
_BLOCK = 256
#: Thread blocks per box: enough of them to fill a GPU; larger boxes loop.
_MAX_BLOCKS = 1024
_AXES = 3


def box_row(view: Any, address: int, first: int) -> list[int]:
    """Return a box as the kernels read it: first cell, place in the buffer, extents and strides.

    Parameters
    ----------
    view : array of 64-bit words
        The cells, of 3 axes at most.
    address : int
        The address of the first cell.
    first : int, words
        Where the words of the box are in the buffer.
    """
    missing = _AXES - view.ndim
    steps = [stride // _WORD for stride in view.strides]
    return [address, first, *[1] * missing, *view.shape, *[0] * missing, *steps]


class Packing:
    """The boxes of all sides, side by side and within a side field by field.

    Loads both kernels now: loading them later would wait for whatever the stream waits for.

    Attributes
    ----------
    total : int, words
        The size of the buffer.
    """

    def __init__(self, problem: Problem, fields: Sequence[Any]) -> None:
        session = problem.session
        xp = session.node.xp
        faces = problem.faces(fields)
        sizes = [sum(view.size for view in each.out) for each in faces]
        self._ends: list[int] = np.cumsum(sizes).tolist()
        self.total = self._ends[-1]
        self._fields = tuple(fields)  # the kernels have addresses only
        self._sources = _table(xp, [view for each in faces for view in each.out])
        self._targets = _table(xp, [view for each in faces for view in each.into])
        module = xp.RawModule(code=Path(__file__).with_suffix(".cu").read_text())
        self._pack, self._unpack = module.get_function("pack"), module.get_function("unpack")
        blocks = min(-(-max(sizes) // (len(fields) * _BLOCK)), _MAX_BLOCKS)
        self._launch = (blocks, len(faces) * len(fields)), (_BLOCK,)
        scratch = xp.zeros(self.total, "u8")
        self.pack(scratch)
        self.unpack(scratch)
        session.synchronize()

    def pack(self, buffer: Any) -> None:
        """Write what leaves into `buffer`. Stream-ordered."""
        self._pack(*self._launch, (buffer, self._sources))

    def unpack(self, buffer: Any) -> None:
        """Write `buffer` into the ghosts. Stream-ordered."""
        self._unpack(*self._launch, (buffer, self._targets))

    def split(self, buffer: Any) -> list[Any]:
        """Return the views of `buffer` that hold the words of each side."""
        return [buffer[a:b] for a, b in zip([0, *self._ends], self._ends, strict=False)]


def _table(xp: Any, views: Sequence[Any]) -> Any:
    rows, first = [], 0
    for view in views:
        rows.append(box_row(view, int(view.data.ptr), first))
        first += int(view.size)
    return xp.asarray(np.array(rows, "i8"))


class NoPacking:
    """In place of a `Packing` for a problem whose fields are buffers: nothing to copy."""

    def __init__(self, fields: Sequence[Any]) -> None:
        self.total = int(fields[0].size)
        self._sides = len(fields[0])

    def pack(self, buffer: Any) -> None:
        """Do nothing: what leaves is in the buffer."""

    def unpack(self, buffer: Any) -> None:
        """Do nothing: the buffer is the ghosts."""

    def split(self, buffer: Any) -> list[Any]:
        """Return the views of `buffer` that hold the words of each side."""
        return list(buffer.reshape(self._sides, -1))

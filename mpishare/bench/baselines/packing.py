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


def side_sizes(problem: Problem, fields: Sequence[Any]) -> list[int]:
    """Return how many words leave through each side."""
    return [sum(int(view.size) for view in problem.leaving(side, fields)) for side in problem.sides]


def split(buffer: Any, sizes: Sequence[int]) -> list[Any]:
    """Return the views of a buffer that hold the words of each side."""
    ends = np.cumsum(sizes).tolist()
    return [buffer[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def box_row(view: Any, address: int, first: int) -> list[int]:
    """Return a box of cells as the kernels read it, from a view of words with 3 axes at most.

    That is the address of the first cell, the place of the box in the buffer (`first`, in words),
    the extents and the strides.
    """
    missing = _AXES - view.ndim
    steps = [stride // _WORD for stride in view.strides]
    return [address, first, *[1] * missing, *view.shape, *[0] * missing, *steps]


class Packing:
    """The boxes of all sides, side by side and within a side field by field.

    Loads both kernels now: loading them later would wait for whatever the stream waits for.
    """

    def __init__(self, problem: Problem, fields: Sequence[Any]) -> None:
        session = problem.session
        xp = session.node.xp
        sides, sizes = problem.sides, side_sizes(problem, fields)
        self._fields = tuple(fields)  # the kernels have addresses only
        self._sources = _table(xp, [view for s in sides for view in problem.leaving(s, fields)])
        self._targets = _table(xp, [view for s in sides for view in problem.arriving(s, fields)])
        module = xp.RawModule(code=Path(__file__).with_suffix(".cu").read_text())
        self._pack, self._unpack = module.get_function("pack"), module.get_function("unpack")
        blocks = min(-(-max(sizes) // (len(fields) * _BLOCK)), _MAX_BLOCKS)
        self._launch = (blocks, len(sides) * len(fields)), (_BLOCK,)
        scratch = xp.zeros(sum(sizes), "u8")
        self.pack(scratch)
        self.unpack(scratch)
        session.synchronize()

    def pack(self, buffer: Any) -> None:
        """Write what leaves into `buffer`. Stream-ordered."""
        self._pack(*self._launch, (buffer, self._sources))

    def unpack(self, buffer: Any) -> None:
        """Write `buffer` into the ghosts. Stream-ordered."""
        self._unpack(*self._launch, (buffer, self._targets))


def _table(xp: Any, views: Sequence[Any]) -> Any:
    rows, first = [], 0
    for view in views:
        rows.append(box_row(view, int(view.data.ptr), first))
        first += int(view.size)
    return xp.asarray(np.array(rows, "i8"))

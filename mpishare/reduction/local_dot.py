"""The dot product of two arrays of this process, block by block in a fixed order.

A block is smaller than those for which a BLAS library starts threads: the bits depend on the arrays
alone, not on the number of threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    Array = np.ndarray[Any, Any]

_BLOCK = 8192  # elements; OpenBLAS starts threads above 10 000


class LocalDot:
    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._scratch = np.empty((2, _BLOCK), dtype)

    def into(self, total: Array, x: Array, y: Array) -> None:
        """Store the dot product of two arrays of the same shape in `total`, of one element."""
        if x.size <= _BLOCK and x.flags.c_contiguous and y.flags.c_contiguous:
            total[...] = np.vdot(x, y)
            return
        total[...] = 0
        for a, b in self._blocks(x, y):
            np.add(total, np.vdot(a, b), out=total)

    def _blocks(self, x: Array, y: Array) -> Iterator[tuple[Array, Array]]:
        """Yield both arrays in pieces of one axis, contiguous, in the order of their elements."""
        if x.flags.f_contiguous and y.flags.f_contiguous:
            x, y = x.T, y.T
        if x.flags.c_contiguous and y.flags.c_contiguous:
            x, y = x.reshape(-1), y.reshape(-1)  # views
            for at in range(0, x.size, _BLOCK):
                yield x[at : at + _BLOCK], y[at : at + _BLOCK]
        else:
            yield from self._gathered(x, y)

    def _gathered(self, x: Array, y: Array) -> Iterator[tuple[Array, Array]]:
        """Yield pieces that are copied together: the last axes as far as they fit."""
        if x.size <= _BLOCK:
            pair = self._scratch[:, : x.size]
            for part, array in zip(pair, (x, y), strict=True):
                part.reshape(array.shape)[...] = array
            yield pair[0], pair[1]
            return
        step = _BLOCK * len(x) // x.size  # along the first axis
        for at in range(0, len(x), max(step, 1)):
            piece = slice(at, at + step) if step else at
            yield from self._gathered(x[piece], y[piece])

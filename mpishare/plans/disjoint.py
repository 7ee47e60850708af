"""Fields of a call must share no cell: ghosts of both would be written, in any order."""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise
from typing import TYPE_CHECKING

import numpy as np

from mpishare.plans.layout import array_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.plans.layout import FieldLayout

_MAX_WORK = 100_000  # some milliseconds; real programs need a few steps


def require_distinct_cells(layout: FieldLayout, name: str) -> None:
    """Raise `ValueError` if two cells of a field share memory, as in a sliding window."""
    axes = sorted((step, n) for step, n in zip(layout.strides, layout.shape, strict=True) if n > 1)
    ends = accumulate(
        axes, lambda end, axis: end + axis[0] * (axis[1] - 1), initial=layout.dtype.itemsize
    )
    if 0 in layout.shape or all(step >= end for (step, _), end in zip(axes, ends, strict=False)):
        return
    cells = array_at(1 << 32, layout)  # anywhere: nothing is read
    for axis in range(cells.ndim):
        # Two cells whose indices differ first along this axis.
        plane = cells[(0,) * axis]
        if _share(plane[:1], plane[1:]):
            raise ValueError(
                f"{name} has two cells in the same memory: its strides are {layout.strides}, its "
                f"shape is {layout.shape}. Give it a copy"
            )


def _share(a: np.ndarray, b: np.ndarray) -> bool:
    try:
        # NumPy takes any bound; its stubs allow two.
        return np.shares_memory(a, b, max_work=_MAX_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return False  # only known overlaps are refused


class Disjoint:
    """Check that fields of these layouts share no memory.

    Interleaved components of one array are disjoint: ``q[..., 0]`` and ``q[..., 1]``. Their check
    is slow and depends only on the distances between the fields, so the last result is cached.
    """

    def __init__(self, layouts: Sequence[FieldLayout]) -> None:
        self._layouts = layouts
        self._spans = [each.span_nbytes for each in layouts]
        self._known: list[int] = []

    def are_apart(self, addresses: Sequence[int]) -> bool:
        """Whether spans are disjoint, or the last `require` passed at the same distances."""
        if len(addresses) < 2:
            return True
        spans = sorted((a, a + nbytes) for a, nbytes in zip(addresses, self._spans, strict=True))
        if all(end <= begin for (_, end), (begin, _) in pairwise(spans)):
            return True
        return _distances(addresses) == self._known

    def require(self, addresses: Sequence[int], numbers: Sequence[int] | None = None) -> None:
        if self.are_apart(addresses):
            return
        named = range(len(addresses)) if numbers is None else numbers
        views = [
            (n, array_at(address, layout))  # nothing is read, as in GPU memory it could not be
            for n, address, layout in zip(named, addresses, self._layouts, strict=True)
        ]
        for (first, a), (second, b) in combinations(views, 2):
            if _share(a, b):
                raise ValueError(
                    f"fields {first} and {second} share memory: the ghosts of both would be "
                    "written. Name each array once."
                )
        self._known = _distances(addresses)


def _distances(addresses: Sequence[int]) -> list[int]:
    return [each - addresses[0] for each in addresses]

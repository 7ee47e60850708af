"""Fields of a call must share no cell: ghosts of both would be written, in any order."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.plans.layout import FieldLayout

_MAX_WORK = 100_000  # some milliseconds; real programs need a few steps


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
        """Raise `ValueError` if two fields at these addresses share a cell."""
        if self.are_apart(addresses):
            return
        named = range(len(addresses)) if numbers is None else numbers
        views = [
            (n, _View(address, layout).array())
            for n, address, layout in zip(named, addresses, self._layouts, strict=True)
        ]
        for (first, a), (second, b) in combinations(views, 2):
            try:
                # NumPy takes any bound; its stubs allow two.
                share = np.shares_memory(a, b, max_work=_MAX_WORK)  # type: ignore[arg-type]
            except np.exceptions.TooHardError:
                continue  # only known overlaps are refused
            if share:
                raise ValueError(
                    f"fields {first} and {second} share memory: the ghosts of both would be "
                    "written. Name each array once."
                )
        self._known = _distances(addresses)


def _distances(addresses: Sequence[int]) -> list[int]:
    return [each - addresses[0] for each in addresses]


class _View:
    """A view of a field by its addresses alone: GPU memory cannot be read here."""

    def __init__(self, address: int, layout: FieldLayout) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": layout.shape,
            "strides": layout.strides,
            "typestr": f"|V{layout.dtype.itemsize}",
        }

    def array(self) -> np.ndarray:
        return np.asarray(self)

"""The cells of a part as strided axes of units, for kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd, prod
from typing import TYPE_CHECKING

import numpy as np

from mpishare.errors import UnsupportedError
from mpishare.plans.cells import Cells, loops
from mpishare.plans.exchange.cuda.records import AXES, CELLS
from mpishare.plans.message import ALIGN

if TYPE_CHECKING:
    from mpishare.plans.layout import FieldLayout
    from mpishare.plans.message import Part


def alignment_of(layout: FieldLayout) -> int:
    """Return the alignment of all arrays of the dtype, in bytes: 16 at most."""
    size = layout.dtype.itemsize
    return min(size & -size, ALIGN)


@dataclass(frozen=True)
class StridedCells:
    first: int
    extents: list[int]
    steps: list[int]
    along: int
    unit: int

    @classmethod
    def of(cls, part: Part, layout: FieldLayout, alignment: int) -> StridedCells:
        """Return the cells of a part, for a field whose address is a multiple of `alignment`."""
        offset, shape, strides, _ = part.cells(layout)
        return _strided_cells(offset, shape, part.along, strides, layout.dtype.itemsize, alignment)

    @cached_property
    def packed(self) -> bytes:
        """The record of the cells, where they lie at no named places."""
        return self.pack(0)

    def pack(self, places: int) -> bytes:
        """Return the record of the cells; their places along an axis lie at an address."""
        rest = (0,) * (AXES - len(self.steps))
        axes = len(self.extents), self.along
        # NumPy takes many times as long to make a record.
        return CELLS.pack(self.first, *self.steps, *rest, places, *self.extents, *rest, *axes)


# Chunks of a part have the same cells, and so have places in many fields of one layout.
@lru_cache(maxsize=256)
def _strided_cells(
    first: int,
    shape: tuple[int, ...],
    along: int,
    strides: tuple[int, ...],
    itemsize: int,
    alignment: int,
) -> StridedCells:
    indexed = {along: np.empty(0)} if along >= 0 else {}  # the kernel has the places
    cells = Cells(first, shape, strides, indexed)
    found = loops([cells], itemsize, reversed(range(len(shape))))[::-1]
    extents = [each.extent for each in found]
    steps = [each.steps[0] for each in found]
    unit = gcd(first, extents[-1], ALIGN, *steps[:-1])
    unit = min(unit & -unit, alignment)
    extents[-1] //= unit
    steps[-1] = unit
    where = [place for place, each in enumerate(found) if not each.is_plain]
    if len(extents) > AXES:
        raise UnsupportedError(
            f"cells of shape {shape} and strides {strides} need {len(extents)} axes: "
            f"{AXES} are allowed"
        )
    if prod(extents) >= 1 << 31:
        raise UnsupportedError(f"{prod(extents)} units in one part of a message: too many")
    return StridedCells(first, extents, steps, where[0] if where else -1, unit)

"""The cells of a part as strided axes of units, for kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod
from typing import TYPE_CHECKING

from mpishare.errors import UnsupportedError
from mpishare.halo.cuda.records import AXES
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
        start = part.box.start if part.box is not None else (0,) * len(part.shape)
        along = -1 if part.box is not None else part.axis
        itemsize = layout.dtype.itemsize
        return _strided_cells(start, part.shape, along, layout.strides, itemsize, alignment)


# Many fields of one layout have the same cells.
@lru_cache(maxsize=256)
def _strided_cells(
    start: tuple[int, ...],
    shape: tuple[int, ...],
    along: int,
    strides: tuple[int, ...],
    itemsize: int,
    alignment: int,
) -> StridedCells:
    first = sum(at * step for at, step in zip(start, strides, strict=True))
    axes: list[tuple[int, int, bool]] = []  # extent, step, whether `places` index it
    for axis, (extent, step) in enumerate(zip(shape, strides, strict=True)):
        if extent != 1 or axis == along:
            _append_axis(axes, extent, step, is_along=axis == along)
    _append_axis(axes, itemsize, 1, is_along=False)
    run = axes[-1][0] if axes[-1][1] == 1 else 1
    unit = gcd(first, run, ALIGN, *(step for _, step, _ in axes[:-1]))
    unit = min(unit & -unit, alignment)
    extents = [extent for extent, _, _ in axes]
    steps = [step for _, step, _ in axes]
    extents[-1] //= unit
    steps[-1] = unit
    indexed = [is_along for _, _, is_along in axes]
    if len(extents) > AXES:
        raise UnsupportedError(
            f"cells of shape {shape} in a field of strides {strides} need {len(extents)} axes: "
            f"{AXES} are allowed"
        )
    if prod(extents) >= 1 << 31:
        raise UnsupportedError(f"{prod(extents)} units in one part of a message: too many")
    return StridedCells(first, extents, steps, indexed.index(True) if True in indexed else -1, unit)


def _append_axis(
    axes: list[tuple[int, int, bool]], extent: int, step: int, *, is_along: bool
) -> None:
    """Append an axis, merged with the one before where both are one contiguous run."""
    if axes:
        before, before_step, before_along = axes[-1]
        if not is_along and not before_along and before_step == extent * step:
            axes[-1] = before * extent, step, False
            return
    axes.append((extent, step, is_along))

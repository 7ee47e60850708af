"""Copies as the compiled part makes them: loops over offsets, relative to the fields of a call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.halo.host.copies import Array
    from mpishare.plans.layout import FieldLayout

Lowered = tuple[int, int, int, tuple[tuple[Any, ...], ...]]
"""``(nbytes, to, from, axes)``: so many bytes at each place of the loops `axes`, slowest first,
from two offsets on. Each axis is ``(count, to, from, to_at, from_at)``: steps in bytes, or tables
of offsets."""


class Cells(NamedTuple):
    """Where the cells of a part are: along each axis a step in bytes, or the offsets of its places.

    Attributes
    ----------
    offset : int, bytes
        From the start of the memory to the first cell.
    shape : tuple of int
        Of the cells.
    strides : tuple of int, bytes
        Along each axis.
    places : dict of int to numpy.ndarray
        For an axis whose places are no slice, their offsets in bytes.
    """

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    places: dict[int, np.ndarray[Any, Any]]


def cells_of(layout: FieldLayout, key: Sequence[Any]) -> Cells:
    """Return the cells that a key of slices, or of an array of indices, names in a field."""
    offset, shape, strides, places = 0, [*layout.shape], [*layout.strides], {}
    for axis, item in enumerate(key):
        extent, stride = layout.shape[axis], layout.strides[axis]
        if isinstance(item, slice):
            start, stop, step = item.indices(extent)
            offset += start * stride
            shape[axis], strides[axis] = len(range(start, stop, step)), step * stride
        else:
            indices = np.asarray(item, np.int64)
            places[axis] = np.where(indices < 0, indices + extent, indices) * stride
            shape[axis] = len(indices)
    return Cells(offset, tuple(shape), tuple(strides), places)


def cells_in(array: Array) -> Cells:
    """Return all cells of an array."""
    return Cells(0, array.shape, array.strides, {})


def lower(to: Cells, source: Cells, itemsize: int, *, by: Cells) -> Lowered | None:
    """Return the loops of a copy, in the order in which the cells of `by` lie; None for no cells.

    Axes along which the cells of both ends lie together become one, and the fastest a longer run.
    """
    if 0 in to.shape:
        return None
    axes: list[list[Any]] = []
    nbytes = itemsize
    order = sorted(
        (axis for axis, count in enumerate(to.shape) if count > 1 or _has_places(to, source, axis)),
        key=lambda axis: by.strides[axis],
    )
    for axis in order:  # from fast to slow
        count, steps = to.shape[axis], [to.strides[axis], source.strides[axis]]
        tables = [_table(end, axis) for end in (to, source)]
        is_plain = tables == [None, None]
        if is_plain and not axes and steps == [nbytes, nbytes]:
            nbytes *= count
        elif is_plain and axes and axes[-1][3:] == [None, None] and steps == _spans(axes[-1]):
            axes[-1][0] *= count
        else:
            axes.append([count, *steps, *tables])
    return nbytes, to.offset, source.offset, tuple(map(tuple, reversed(axes)))


def _has_places(to: Cells, source: Cells, axis: int) -> bool:
    return axis in to.places or axis in source.places


def _table(cells: Cells, axis: int) -> bytes | None:
    return cells.places[axis].tobytes() if axis in cells.places else None


def _spans(axis: Sequence[Any]) -> list[int]:
    return [axis[0] * axis[1], axis[0] * axis[2]]

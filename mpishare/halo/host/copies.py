"""Copies between arrays in host memory: bound to the arrays of a call once, run at every call.

Cutting a box out of an array takes as long as copying a small one, so it is done beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mpishare.plans.layout import FieldLayout

Array = np.ndarray[Any, Any]

Copy = Callable[[], None]
"""Copies some cells."""

Store = Callable[[Array, Any, Array], None]
"""Stores received cells, `put` or `add`: ``store(array, key, cells)``."""

WHOLE = (...,)
"""The key of all cells of an array."""

_MAX_RUN_NBYTES = 1024  # of cells that are copied as one; beyond, NumPy's own loop is as fast
_MAX_COLUMNS = 8  # of a face; each column brings in the same cache lines again
_CACHE_NBYTES = 512 << 10
_LINE_NBYTES = 64
_MIN_BLOCKED_NBYTES = 128 << 10  # less than this stays in the cache anyway


def put(array: Array, key: Any, cells: Array) -> None:
    """Overwrite cells with the received ones."""
    array[key] = cells


def add(array: Array, key: Any, cells: Array) -> None:
    """Add the received cells; where an index occurs twice, both are added, in order."""
    if all(isinstance(item, slice) for item in key):
        target = array[key]
        np.add(target, cells, out=target)
    else:
        np.add.at(array, key, cells)


def bind_copy(store: Store, target: Array, key: Any, source: Array, source_key: Any) -> Copy:
    """Return the call that stores cells of `source` in `target`."""
    if not _is_box(source_key):
        return lambda: store(target, key, source[source_key])
    if store is put and _is_box(key):
        cells, theirs = merge_runs(target[key], source[source_key])
        return partial(cells.__setitem__, ..., theirs)
    return partial(store, target, key, source[source_key])


def merge_runs(target: Array, source: Array) -> tuple[Array, Array]:
    """Return both arrays with the cells that lie together, in both alike, as one element.

    NumPy's innermost loop goes along them, and costs 5 ns each time that it begins: as much as
    copying 64 bytes. Elements of one run are copied in a loop over the runs.
    """
    if target.dtype != source.dtype or not target.size:
        return target, source
    nbytes, merged = target.itemsize, set()
    for axis in sorted(range(target.ndim), key=target.strides.__getitem__):
        cells = target.shape[axis]
        if cells > 1:
            if not target.strides[axis] == source.strides[axis] == nbytes:
                break
            if nbytes * cells > _MAX_RUN_NBYTES:
                break
            nbytes *= cells
            merged.add(axis)
    if not merged:
        return target, source
    kept = [axis for axis in range(target.ndim) if axis not in merged]

    def merge(array: Array) -> Array:
        shape = (*(array.shape[axis] for axis in kept), nbytes // array.itemsize)
        strides = (*(array.strides[axis] for axis in kept), array.itemsize)
        return as_strided(array, shape, strides).view(f"V{nbytes}")[..., 0]

    return merge(target), merge(source)


def bind_copy_within(array: Array, key: Any, source_key: Any) -> list[Copy]:
    """Return the calls that copy cells of an array to others of it, which do not overlap.

    NumPy compares only the first and the last byte of both boxes. At the two ends of each row
    these ranges overlap, and it would copy by way of a temporary array, at twice the cost; not so
    along a single axis. So a face of few columns is copied column by column.
    """
    axis = _column_axis(array, key, source_key)
    if axis is None:
        return [bind_copy(put, array, key, array, source_key)]
    columns = [np.moveaxis(array[each], axis, 0) for each in (key, source_key)]
    if array.strides[axis] == array.itemsize:  # together they are one column of wider cells
        dtype = f"V{len(columns[0]) * array.itemsize}"
        columns = [np.moveaxis(np.moveaxis(each, 0, -1).view(dtype), -1, 0) for each in columns]
    extents = (*array.shape[:axis], *array.shape[axis + 1 :])
    return [
        copy
        for target, source in zip(*columns, strict=True)
        for copy in _bind_column(target, source, extents)
    ]


def _column_axis(array: Array, key: Any, source_key: Any) -> int | None:
    """Return the one axis along which two boxes differ, if their columns are to be copied."""
    if not _is_box(key) or not _is_box(source_key):
        return None
    axes = [axis for axis, (to, at) in enumerate(zip(key, source_key, strict=True)) if to != at]
    if len(axes) != 1 or not np.may_share_memory(array[key], array[source_key]):
        return None
    return axes[0] if array[key].shape[axes[0]] <= _MAX_COLUMNS else None


class _Axis(NamedTuple):
    """An axis of a column; `extent` counts the ghosts, too. Sorted from slow to fast."""

    stride: int
    cells: int
    extent: int


def _bind_column(target: Array, source: Array, extents: tuple[int, ...]) -> list[Copy]:
    """Return the calls that copy a column, through all planes at once where that is possible.

    The ghosts between two planes are then overwritten with the others, and restored.
    """
    axes = sorted(map(_Axis, target.strides, target.shape, extents), reverse=True)
    axes = [axis for axis in axes if axis.cells > 1]
    if len(axes) == 2:
        plane, row = axes
        if plane.stride == row.stride * row.extent and row.extent <= 2 * row.cells:
            shape = ((plane.cells - 1) * row.extent + row.cells,)
            line = as_strided(target, shape, (row.stride,))
            between = plane.cells - 1, row.extent - row.cells
            ghosts = as_strided(line[row.cells :], between, (plane.stride, row.stride))
            saved = np.empty(ghosts.shape, ghosts.dtype)
            pairs = (
                (saved, ghosts),
                (line, as_strided(source, shape, (row.stride,))),
                (ghosts, saved),
            )
            return [partial(to.__setitem__, ..., cells) for to, cells in pairs if to.size]
    return [partial(target.squeeze().__setitem__, ..., source.squeeze())]


def _is_box(key: Any) -> bool:
    return all(item is ... or isinstance(item, slice) for item in key)


class SelfCopy(NamedTuple):
    """A copy between two places in one field of this rank."""

    field: int
    key: Any
    source_key: Any


def block_for_cache(copies: Iterable[SelfCopy], layouts: Sequence[FieldLayout]) -> list[SelfCopy]:
    """Return the same copies, those of large boxes a few planes at a time.

    Copies that have their planes in common are then made block by block, so that the cache lines
    of one serve the next. None of the copies may read what another one writes.
    """
    found: list[SelfCopy] = []
    groups: dict[tuple[int, int, int], list[SelfCopy]] = {}
    nbytes_of: dict[tuple[int, int, int], int] = {}
    for copy in copies:
        nbytes = _plane_nbytes(copy, layouts[copy.field].dtype.itemsize)
        if nbytes:
            planes = copy.field, copy.key[0].start, copy.key[0].stop
            groups.setdefault(planes, []).append(copy)
            nbytes_of[planes] = nbytes_of.get(planes, 0) + nbytes
        else:
            found.append(copy)
    for (field, start, stop), group in groups.items():
        step = max(1, _CACHE_NBYTES // nbytes_of[field, start, stop])
        for first in range(start, stop, step):
            block = slice(first, min(first + step, stop))
            found += [
                SelfCopy(field, (block, *copy.key[1:]), (block, *copy.source_key[1:]))
                for copy in group
            ]
    return found


def _plane_nbytes(copy: SelfCopy, itemsize: int) -> int:
    """Return what one plane of a copy takes in the cache; 0 if the copy is not worth blocking."""
    keys = (*copy.key, *copy.source_key)
    if len(copy.key) < 2 or not all(isinstance(key, slice) for key in keys):
        return 0
    shape: list[int] = [key.stop - key.start for key in copy.key]
    if copy.key[0] != copy.source_key[0] or prod(shape) * itemsize < _MIN_BLOCKED_NBYTES:
        return 0
    return 2 * prod(shape[1:-1]) * max(shape[-1] * itemsize, _LINE_NBYTES)

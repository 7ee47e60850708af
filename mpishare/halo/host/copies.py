"""What a call of a plan does in host memory, prepared once for the places where its fields are."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.halo.layout import Layout

Array = np.ndarray[Any, Any]

Move = Callable[[], None]
"""Moves some cells."""

Land = Callable[[Array, Any, Array], None]
"""Puts cells that came in where they belong: ``land(array, key, cells)``."""

_MOST_COLUMNS = 8  # of a wide face: more of them would bring each cache line in too often

WHOLE = (...,)
"""Indexes all cells of an array."""


class Call:
    """What a call does with fields at certain addresses, as far as that can be known beforehand.

    Attributes
    ----------
    version : int
        Of the node's windows, for which it holds.
    arrays : list of numpy.ndarray
        The fields, without a hold on their memory: whoever makes the call has that.
    stamp : int
        What names `places`; 0 where all fields are packed.
    places : tuple of int
        Of each field, as `HostRoute` tells its readers.
    packs : pair of list of Move
        Into the packed copies, for even epochs and for odd ones.
    own : list of Move
        Within this rank's fields.
    takes : dict
        By sender, turn and the sender's stamp, what takes its cells.
    """

    def __init__(self, version: int) -> None:
        self.version = version
        self.arrays: list[Array] = []
        self.stamp = 0
        self.places: tuple[int, ...] = ()
        self.packs: tuple[list[Move], list[Move]] = ([], [])
        self.own: list[Move] = []
        self.takes: dict[tuple[int, int, int], list[Move]] = {}


def cells_at(address: int, layout: Layout) -> Array:
    """Return the cells at an address, as elements in which they travel.

    Without a hold on the memory: a window could not be unmapped then.
    """
    cells = (ctypes.c_char * layout.span_nbytes).from_address(address)
    return np.ndarray(
        layout.shape, layout.carrier, buffer=memoryview(cells), strides=layout.strides
    )


def moving(land: Land, to: Array, key: Any, of: Array, source: Any) -> Move:
    """Return the call that puts cells of an array where they belong in another.

    As much of it as can be done beforehand: to cut out a box costs as much as to copy a small one.
    """
    if not _is_box(source):
        return lambda: land(to, key, of[source])
    if land is put and _is_box(key):
        return partial(to[key].__setitem__, ..., of[source])
    return partial(land, to, key, of[source])


def within(array: Array, to: Any, of: Any) -> list[Move]:
    """Return what copies cells of an array to others of it, in which nobody reads meanwhile.

    Where the first and the last byte of two arrays tell no more than that they may overlap, which
    is so at the two ends of all rows, NumPy copies by way of a third one: twice as much work. Not
    if they have one axis. So columns are copied one by one, each as one line through all planes.
    """
    if _is_box(to) and _is_box(of) and np.may_share_memory(array[to], array[of]):
        apart = [axis for axis, pair in enumerate(zip(to, of, strict=True)) if pair[0] != pair[1]]
        if len(apart) == 1 and array[to].shape[apart[0]] <= _MOST_COLUMNS:
            columns = (np.moveaxis(array[key], apart[0], 0) for key in (to, of))
            extents = (*array.shape[: apart[0]], *array.shape[apart[0] + 1 :])
            lines = [_line(one, other, extents) for one, other in zip(*columns, strict=True)]
            return [move for line in lines for move in line]
    return [moving(put, array, to, array, of)]


def _line(to: Array, of: Array, extents: tuple[int, ...]) -> list[Move]:
    """Return what copies a column: as a line, if it is one but for some ghosts between its planes.

    These are of the column that is written, and are put back.
    """
    steps = zip(to.strides, to.shape, extents, strict=True)
    long = sorted((each for each in steps if each[1] > 1), reverse=True)
    if len(long) == 2:
        (plane, planes, _), (row, rows, extent) = long
        if plane == row * extent and extent <= 2 * rows:
            shape = ((planes - 1) * extent + rows,)
            line, source = as_strided(to, shape, (row,)), as_strided(of, shape, (row,))
            ghosts = as_strided(line[rows:], (planes - 1, extent - rows), (plane, row))
            kept = np.empty(ghosts.shape, ghosts.dtype)
            pairs = (kept, ghosts), (line, source), (ghosts, kept)
            return [partial(one.__setitem__, ..., other) for one, other in pairs if one.size]
    return [partial(to.squeeze().__setitem__, ..., of.squeeze())]


def _is_box(key: Any) -> bool:
    return all(item is ... or isinstance(item, slice) for item in key)


def put(array: Array, key: Any, cells: Array) -> None:
    """Overwrite cells with those that came in."""
    array[key] = cells


def add(array: Array, key: Any, cells: Array) -> None:
    """Add the cells that came in, one after the other where a cell is named twice."""
    if all(isinstance(item, slice) for item in key):
        target = array[key]
        np.add(target, cells, out=target)
    else:
        np.add.at(array, key, cells)


_CACHE_NBYTES = 512 << 10
_LINE_NBYTES = 64
_WORTH_NBYTES = 128 << 10  # below, all that is copied stays in the cache anyway

Copy = tuple[int, Any, Any]
"""A field, where cells go, and where they come from."""


class Own:
    """The copies of one plan within this rank's fields. Local.

    Parameters
    ----------
    copies : sequence of Copy
        None of which reads what another writes.
    shapes : sequence of tuple of int
        Of the cells of each.
    itemsizes : sequence of int, bytes
        Of each field.

    Attributes
    ----------
    copies : list of Copy
        To make one after the other.
    """

    def __init__(
        self,
        copies: Sequence[Copy],
        shapes: Sequence[tuple[int, ...]],
        itemsizes: Sequence[int],
    ) -> None:
        whole: list[Copy] = []
        blocked: dict[tuple[int, int, int], list[tuple[Copy, tuple[int, ...]]]] = {}
        for copy, shape in zip(copies, shapes, strict=True):
            field, to, of = copy
            is_boxes = all(isinstance(each, slice) for each in (*to, *of))
            if (
                is_boxes
                and len(shape) > 1
                and to[0] == of[0]
                and prod(shape) * itemsizes[field] >= _WORTH_NBYTES
            ):
                blocked.setdefault((field, to[0].start, to[0].stop), []).append((copy, shape))
            else:
                whole.append(copy)
        self.copies = whole
        for (_, start, stop), group in blocked.items():
            touched = sum(
                2 * prod(shape[1:-1]) * max(shape[-1] * itemsizes[copy[0]], _LINE_NBYTES)
                for copy, shape in group
            )
            step = max(1, _CACHE_NBYTES // touched)
            for first in range(start, stop, step):
                planes = slice(first, min(first + step, stop))
                self.copies += [
                    (field, (planes, *to[1:]), (planes, *of[1:])) for (field, to, of), _ in group
                ]

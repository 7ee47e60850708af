"""Cells of arrays as integers, and the one lowering of them: to loops, for C and for kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from operator import sub
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mpishare.plans.layout import FieldLayout

    Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Box:
    """A box of cells of an array: along each axis from `lower` up to before `upper`.

    Parameters
    ----------
    lower, upper : tuple of int
        One for each axis.

    Attributes
    ----------
    shape : tuple of int
        Cells along each axis.
    size : int
        Cells in all.
    slices : tuple of slice
        The index of the box in the array: ``whole[box.slices]``.
    """

    lower: tuple[int, ...]
    upper: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(sub, self.upper, self.lower))

    @property
    def size(self) -> int:
        return prod(self.shape)

    def along(self, axes: Sequence[int], shape: Sequence[int]) -> Box:
        """Return the same cells of a field that the cart cuts along `axes`, whole along others."""
        start, stop = [0] * len(shape), list(shape)
        for axis, first, last in zip(axes, self.lower, self.upper, strict=True):
            start[axis], stop[axis] = first, last
        return Box(tuple(start), tuple(stop))

    def __and__(self, other: Box) -> Box:
        """Return the cells of both; a box without cells if they have none in common."""
        start = tuple(map(max, self.lower, other.lower))
        stop = tuple(map(min, self.upper, other.upper))
        return Box(start, tuple(map(max, start, stop)))

    def seen_from(self, origin: Sequence[int]) -> Box:
        """Return the same cells in an array whose first cell is this one."""
        start = tuple(at - first for at, first in zip(self.lower, origin, strict=True))
        stop = tuple(at - first for at, first in zip(self.upper, origin, strict=True))
        return Box(start, stop)

    def cut(self, axis: int, first: int, last: int) -> Box:
        """Return the planes from `first` up to before `last` along `axis`, at most to the end."""
        return self.within(axis, self.lower[axis] + first, self.lower[axis] + last)

    def within(self, axis: int, start: int, stop: int) -> Box:
        """Return the cells that lie from `start` up to before `stop` along `axis`."""
        low, high = self.lower[axis], self.upper[axis]
        first = min(max(start, low), high)
        last = max(min(stop, high), first)
        return Box(
            (*self.lower[:axis], first, *self.lower[axis + 1 :]),
            (*self.upper[:axis], last, *self.upper[axis + 1 :]),
        )

    def outside(self, inner: Box) -> tuple[Box, ...]:
        """Return disjoint boxes of the cells outside `inner`, two an axis at most."""
        rest, found = self, []
        for axis, (start, stop) in enumerate(zip(inner.lower, inner.upper, strict=True)):
            found += [rest.within(axis, rest.lower[axis], start)]
            found += [rest.within(axis, stop, rest.upper[axis])]
            rest = rest.within(axis, start, stop)
        return tuple(box for box in found if box.size)

    def without(self, *others: Box) -> list[Box]:
        """Return disjoint boxes of the cells that are in none of the others."""
        rest = [self]
        for other in others:
            pairs = [(box, box & other) for box in rest]
            rest = [r for box, both in pairs for r in (box.outside(both) if both.size else (box,))]
        return rest

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(map(slice, self.lower, self.upper))

    def pack(self) -> Any:
        """Return the box for JSON; `unpack` makes it again."""
        return [self.lower, self.upper]

    @classmethod
    def unpack(cls, packed: Any) -> Box:
        lower, upper = packed
        return cls(tuple(lower), tuple(upper))


def meet(boxes: Sequence[Box], others: Sequence[Box]) -> Any:
    """Return which boxes of a field share cells with which others: at once, for all."""
    ndim = len(others[0].lower)
    lower, other_lower, upper, other_upper = (
        np.array([getattr(box, end) for box in each], np.int64).reshape(len(each), ndim)
        for end in ("lower", "upper")
        for each in (boxes, others)
    )
    first, last = np.maximum(lower[:, None], other_lower), np.minimum(upper[:, None], other_upper)
    return (first < last).all(-1)


class Turn(NamedTuple):
    """How the axes of a field lie in a box that travels: one of them turned, then reversed."""

    axes: tuple[int, ...]  # by axis of the field, the one that travels
    flip: tuple[int, ...]  # axes of the field that run backwards

    @property
    def inverse(self) -> tuple[int, ...]:
        """By axis that travels, the one of the field."""
        return tuple(sorted(range(len(self.axes)), key=self.axes.__getitem__))

    def view(self, array: Any) -> Any:
        """Return the cells of an array of NumPy in the order in which they travel."""
        return np.flip(array, self.flip).transpose(self.inverse)


class Cells(NamedTuple):
    """Cells of some memory: along each axis a step in bytes, or the offsets of its places."""

    offset: int  # of the first cell
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    places: dict[int, Array]  # by axis, for those whose places are no slice: offsets in bytes

    @classmethod
    def of_array(cls, array: Array) -> Cells:
        """Return all cells of an array."""
        return cls(0, array.shape, array.strides, {})

    @classmethod
    def of_key(cls, layout: FieldLayout, key: Sequence[Any]) -> Cells:
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
        return cls(offset, tuple(shape), tuple(strides), places)

    def turned(self, turn: Turn | None) -> Cells:
        """Return the same cells, all of them by strides, with the axes of a box that travels."""
        if turn is None:
            return self
        offset, shape, strides, places = self
        ends = {axis: (shape[axis] - 1) * strides[axis] for axis in turn.flip}
        steps = [-step if axis in ends else step for axis, step in enumerate(strides)]
        order = turn.inverse
        return Cells(
            offset + sum(ends.values()),
            tuple(shape[axis] for axis in order),
            tuple(steps[axis] for axis in order),
            places,
        )

    def by_stride(self) -> list[int]:
        """Return the axes, the fastest in memory first."""
        return sorted(range(len(self.shape)), key=lambda axis: abs(self.strides[axis]))


def cut_item(item: Any, extent: int, first: int, last: int) -> Any:
    """Return an item of a key with its places from `first` up to before `last` alone."""
    if not isinstance(item, slice):
        return item[first:last]
    places = range(extent)[item][first:last]
    return slice(places.start, places.stop, places.step)


class Loop(NamedTuple):
    """A loop over cells in one memory or several: with a step in each, or a table of offsets."""

    extent: int
    steps: tuple[int, ...]
    places: tuple[Array | None, ...]
    nbytes: Array | None = None  # of the run at each place, where these differ
    slides: bool = False  # how many cells it has is known at each call

    @property
    def is_plain(self) -> bool:
        return not self.slides and all(each is None for each in self.places)


def loops(
    ends: Sequence[Cells], itemsize: int, axes: Iterable[int], sliding: int = -1
) -> list[Loop]:
    """Return the loops over the bytes of cells that lie in some memories, in the order of `axes`.

    The first is over a run of bytes that lie together in all of them. Axes become one where the
    step of the later is the whole of the one before; the one that is `sliding` stays alone.
    """
    found = [Loop(itemsize, (1,) * len(ends), (None,) * len(ends))]
    for axis in axes:
        made = Loop(
            ends[0].shape[axis],
            tuple(end.strides[axis] for end in ends),
            tuple(end.places.get(axis) for end in ends),
            slides=axis == sliding,
        )
        last = found[-1]
        spans = tuple(last.extent * step for step in last.steps)
        if made.is_plain and last.is_plain and made.steps == spans:
            found[-1] = last._replace(extent=last.extent * made.extent)
        elif made.extent > 1 or not made.is_plain:
            found.append(made)
    return found


# Up to so many bytes at a place are a single move, a run of any length is a call of memcpy: runs
# of 5 doubles took 1.16 of the time of single moves, runs of 6 took 0.90, runs of 8 took 0.69.
_MAX_MOVED_NBYTES, _MIN_PLACES_OF_RUN = 16, 6


def _in_runs(loop: Loop, nbytes: int) -> Loop:
    """Return a loop that moves neighboring runs of `nbytes` at once, where many are neighbors."""
    if loop.is_plain or loop.slides:
        return loop
    ends = [
        step * np.arange(loop.extent) if at is None else at
        for step, at in zip(loop.steps, loop.places, strict=True)
    ]
    follows = np.logical_and.reduce([np.diff(at) == nbytes for at in ends])
    first = np.flatnonzero(np.r_[True, ~follows])
    least = _MIN_PLACES_OF_RUN if nbytes <= _MAX_MOVED_NBYTES else 1
    if least * len(first) >= loop.extent:
        return loop
    lengths = nbytes * np.diff(np.r_[first, loop.extent])
    return Loop(len(first), (0,) * len(ends), tuple(at[first] for at in ends), lengths)


# C moves shorter runs in tiles, along the axes that are fastest at either end: these come last.
_MAX_TILED_NBYTES = 16


def _tile(outer: list[Loop]) -> None:
    """Let the loops that are fastest at either end come first, the innermost ones."""
    if all(each.is_plain for each in outer):
        for end in range(2):
            fastest = min(range(len(outer)), key=lambda at: abs(outer[at].steps[end]), default=0)
            if fastest > 1:
                outer.insert(1, outer.pop(fastest))


Lowered = tuple[Any, ...] | None


def lower(to: Cells, source: Cells, itemsize: int, *, by: Cells, sliding: int = -1) -> Lowered:
    """Return a copy as C makes it, in the order in which the cells of `by` lie; None for no cells.

    ``(nbytes, to, from, loops)``: so many bytes at each place of the loops, slowest first, from two
    offsets on. Each loop is ``(count, to, from, to_at, from_at, nbytes_at)``: steps, or tables of
    offsets, and of the bytes at each place instead of `nbytes`. Behind them is the number of the
    loop over the axis that is `sliding`, if any is.
    """
    if to.places or source.places or by.places:
        return _lower(to, source, itemsize, by, sliding)
    return _lower_known(to[:3], source[:3], itemsize, by[:3], sliding)


@lru_cache(maxsize=2048)
def _lower_known(to: Any, source: Any, itemsize: int, by: Any, sliding: int) -> Lowered:
    """Lower cells that have no places: fields of one shape have the same."""
    ends = [Cells._make((*each, {})) for each in (to, source, by)]
    return _lower(ends[0], ends[1], itemsize, ends[2], sliding)


def _lower(to: Cells, source: Cells, itemsize: int, by: Cells, sliding: int) -> Lowered:
    if 0 in to.shape:
        return None
    run, *outer = loops((to, source), itemsize, by.by_stride(), sliding)
    if run.extent <= _MAX_TILED_NBYTES:
        _tile(outer)
    outer[:1] = [_in_runs(each, run.extent) for each in outer[:1]]
    axes = (
        (
            each.extent,
            *each.steps,
            *(at if at is None else at.tobytes() for at in (*each.places, each.nbytes)),
        )
        for each in reversed(outer)
    )
    slides = [at for at, each in enumerate(reversed(outer)) if each.slides]
    return run.extent, to.offset, source.offset, tuple(axes), *slides

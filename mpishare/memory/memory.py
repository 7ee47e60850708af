"""The base of memories as one rank holds them: who keeps one mapped, and when it is closed.

Arrays of one memory share an anchor, which lives as long as the last of them and holds all that
they need. A derived class makes the anchor and arrays on it, and unmaps or frees.
"""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from mpishare.memory import dtypes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Shape = tuple[int, ...]


def compact_strides(shape: Shape, itemsize: int, order: Sequence[int] | None = None) -> Shape:
    """Return the strides of an array without gaps; `order` has its axes, the fastest last."""
    strides, step = [0] * len(shape), itemsize
    for axis in reversed(range(len(shape)) if order is None else order):
        strides[axis] = step
        step *= max(shape[axis], 1)
    return tuple(strides)


def span_nbytes(shape: Shape, strides: Shape, itemsize: int) -> int:
    """Return the bytes from the first element of an array to the end of the last."""
    if 0 in shape:
        return 0
    return itemsize + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))


def address_of(array: np.ndarray[Any, Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def root_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the array at the end of the chain of views: the given one if it is no view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


class ArrayLayout(NamedTuple):
    """An array in memory: `strides` in bytes, None in C order; `offset` of its first element."""

    shape: Shape
    dtype: np.dtype[Any]
    strides: Shape | None = None
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_dense(self) -> bool:
        """Whether it fills its memory, in whatever order of its axes: C, Fortran, any other."""
        expected = self.dtype.itemsize
        for stride, extent in sorted(zip(self.strides or (), self.shape, strict=False)):
            if extent != 1:
                if stride != expected:
                    return 0 in self.shape
                expected *= extent
        return True

    def is_inside(self, nbytes: int) -> bool:
        """Whether all of its bytes lie in so many, where its strides are given."""
        if 0 in self.shape:
            return 0 <= self.offset <= nbytes
        axes = zip(self.shape, self.strides or (), strict=True)
        steps = [(extent - 1) * stride for extent, stride in axes]
        first = self.offset + sum(step for step in steps if step < 0)
        last = self.offset + sum(step for step in steps if step > 0)
        return first >= 0 and last + self.dtype.itemsize <= nbytes

    def pack(self) -> list[Any]:
        """Return the description from which other ranks `unpack` the same layout."""
        return [self.shape, dtypes.dump(self.dtype), self.strides, self.offset]

    @classmethod
    def unpack(cls, packed: list[Any]) -> Self:
        shape, dtype, strides, offset = packed
        strides = None if strides is None else tuple(strides)
        return cls(tuple(shape), dtypes.load(dtype), strides, offset)


class Memory(ABC):
    """An allocation as one rank holds it: its own, or a mapping of another rank's."""

    is_given = False  # whether it is the user's own, shared in place
    is_readonly = False  # whether its arrays are, where their library has such arrays

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address  # in this process
        self.nbytes = nbytes
        self._anchor: Callable[[], Any] = lambda: None

    @property
    def is_held(self) -> bool:
        """Whether arrays on it are alive."""
        return self._anchor() is not None

    def array(self, shape: Shape, dtype: Any) -> Any:
        """Return the first bytes as an array, which keeps the mapping alive."""
        return self.view(ArrayLayout(shape, np.dtype(dtype)))

    def view(self, layout: ArrayLayout) -> Any:
        """Return an array of a layout, which keeps the mapping alive."""
        return self._array(self._hold(), layout)

    def part(self, offset: int, nbytes: int, free: Callable[[], object]) -> Memory:
        """Return a part of memory that is new here, which calls `free` when it is closed."""
        raise NotImplementedError

    def protect(self, *, is_own: bool) -> None:  # noqa: ARG002  as in `HostMemory`
        """Make it read-only: its arrays from now on, and the mapping if it is another rank's."""
        self.is_readonly = True

    def when_dropped(self, then: Callable[[], object]) -> None:
        """Call `then` when the last array on it is gone; not at exit of the interpreter."""
        if (anchor := self._anchor()) is not None:
            weakref.finalize(anchor, then).atexit = False

    def close(self) -> bool:
        """Unmap or free; return False, with nothing done, if live arrays forbid that."""
        if self.is_held:
            return False
        self._release()
        return True

    def _hold(self) -> Any:
        anchor = self._anchor()
        if anchor is None:
            anchor = self._new_anchor()
            self._anchor = weakref.ref(anchor)
        return anchor

    @abstractmethod
    def _new_anchor(self) -> Any: ...

    @abstractmethod
    def _array(self, anchor: Any, layout: ArrayLayout) -> Any: ...

    @abstractmethod
    def _release(self) -> None: ...


class WindowPart(Memory):
    """A part of a segment that this rank has mapped already, and that it keeps mapped."""

    def __init__(self, whole: Memory, offset: int, nbytes: int) -> None:
        super().__init__(whole.address + offset, nbytes)
        self._whole, self._offset = whole, offset
        self._keeper = whole.array((whole.nbytes,), "u1")

    def _hold(self) -> Any:
        return self._new_anchor()  # it holds the memory also where no array of this part does

    def _new_anchor(self) -> Any:
        if self._keeper is None:
            raise ValueError("the memory is closed")
        return self._keeper

    def _array(self, anchor: Any, layout: ArrayLayout) -> Any:
        if self.is_readonly and isinstance(anchor, np.ndarray):
            offset = self._offset + layout.offset
            shown = host_anchor(memoryview(anchor.data).toreadonly())
            return host_array(shown, layout._replace(offset=offset))
        del anchor  # holds the segment's, on which this array is made
        return self._whole.view(layout._replace(offset=self._offset + layout.offset))

    def _release(self) -> None:
        self._keeper = None


def cut(whole: Memory, spans: Sequence[tuple[int, int]]) -> list[Memory]:
    """Cut memory into parts of (offset, nbytes); the last of them to be closed closes it."""
    left = len(spans)

    def free() -> None:
        nonlocal left
        left -= 1
        if not left:
            whole.close()

    return [whole.part(offset, nbytes, free) for offset, nbytes in spans]


def host_anchor(buffer: Any, nbytes: int = -1, offset: int = 0) -> np.ndarray[Any, Any]:
    """Return bytes of a mapping as the base of arrays, which keep it mapped by that.

    An array made on the mapping itself does not: it would be a segmentation fault after `close`.
    """
    return np.frombuffer(buffer, np.uint8, nbytes, offset)


def host_array(anchor: np.ndarray[Any, Any], layout: ArrayLayout) -> np.ndarray[Any, Any]:
    return np.ndarray(layout.shape, layout.dtype, anchor, layout.offset, layout.strides)

"""The segments of a window: each was allocated or given by one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from types import ModuleType

    from mpishare.backends import Memory

Shape = tuple[int, ...]


class Segment(NamedTuple):
    """The layout of one rank's part of a window; `strides` in bytes, None in C order."""

    shape: Shape
    strides: Shape | None = None


class WindowPart:
    """A part of a segment that this rank has mapped already, and that it keeps mapped."""

    is_given = False
    is_held = False  # its arrays keep the segment mapped

    def __init__(self, whole: Memory, offset: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.address = whole.address + offset
        self._offset = offset
        self._whole: Memory | None = whole
        self._hold = whole.array((whole.nbytes,), "u1")

    def array(
        self,
        shape: tuple[int, ...],
        dtype: Any,
        strides: tuple[int, ...] | None = None,
        offset: int = 0,
    ) -> Any:
        if self._whole is None:
            raise ValueError("the memory is closed")
        return self._whole.array(shape, dtype, strides, self._offset + offset)

    def close(self) -> bool:
        self._whole = self._hold = None
        return True


class EmptyMemory:
    is_given = False
    is_held = False
    nbytes = 0
    address = 0

    def __init__(self, xp: ModuleType) -> None:
        self._xp = xp

    def array(
        self,
        shape: tuple[int, ...],
        dtype: Any,
        strides: tuple[int, ...] | None = None,  # noqa: ARG002  of no elements
        offset: int = 0,  # noqa: ARG002  of no bytes
    ) -> Any:
        return self._xp.empty(shape, dtype)

    def close(self) -> bool:
        return True

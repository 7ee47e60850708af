"""Cache of array addresses: reading them from CuPy costs as much as a launch."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any
from weakref import ref

import cupy

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.plans.layout import FieldLayout

_Array = cupy.ndarray
_layout_of = attrgetter("shape", "strides", "dtype")
_MOST = 64


class SeenArrays:
    """The CuPy arrays of one layout among the arguments of earlier calls.

    `known` has a weak reference, the shape and the address by id. An id may be reused once its
    array is gone: compare the referent. An array keeps its memory, dtype and device; its shape may
    be set.
    """

    def __init__(self, layout: FieldLayout) -> None:
        self._layout = _layout_of(layout)
        self.device = layout.device
        self.known: dict[int, tuple[Callable[[], Any], tuple[int, ...], int]] = {}

    def lookup(self, array: Any) -> int | None:
        """Return the address of an array that is not cached yet; None for another layout."""
        if type(array) is not _Array or _layout_of(array) != self._layout:
            return None
        if array.data.device_id != self.device:
            return None
        if len(self.known) >= _MOST:
            self.known.clear()
        address = int(array.data.ptr)
        self.known[id(array)] = ref(array), array.shape, address
        return address

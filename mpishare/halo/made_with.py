"""The arrays that a plan was made with, for calls without arguments.

They are held until a call is given arrays: a plan that is used with other arrays should not hold
the memory of its first ones as long as it lives. From then on there are only weak references. A
view is often made for the plan alone, as in ``HaloExchange(cart, q[0], 1)``: it is made again as
long as its base lives.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.memory.memory import address_of, root_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    View = tuple[Any, Callable[[Any], Any]]
    """The base of a view, and a function that makes the view from it."""


class MadeWith:
    """Some arrays, held until `release`, weakly referenced from then on; none for a `Layout`."""

    def __init__(self, arrays: Sequence[Any]) -> None:
        self._held: list[Any] = list(arrays)
        self.are_held = bool(arrays)
        self._found = [_weakly(array) for array in arrays]

    def __len__(self) -> int:
        return len(self._found)

    def arrays(self) -> list[Any]:
        """Return the arrays; an empty list if one of them is gone."""
        if self.are_held:
            return self._held
        arrays = [find() for find in self._found]
        return [] if any(array is None for array in arrays) else arrays

    def release(self) -> None:
        self._held, self.are_held = [], False


def _weakly(array: Any) -> Callable[[], Any]:
    itself = weakref.ref(array)
    view = _view_of(array)
    if view is None:
        return itself
    root, make = view
    base = weakref.ref(root)

    def find() -> Any:
        array = itself()
        if array is None and (root := base()) is not None:
            array = make(root)
        return array

    return find


def _view_of(array: Any) -> View | None:
    """Return the base of a view and a function that remakes the view; None for other arrays."""
    if isinstance(array, np.ndarray):
        return _numpy_view(array)
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and isinstance(array, torch.Tensor):
        place = array.size(), array.stride(), array.storage_offset()
        root = array._base
        return None if root is None else (root, lambda root: torch.as_strided(root, *place))
    if cupy is not None and isinstance(array, cupy.ndarray) and array.base is not None:
        shape, dtype, strides = array.shape, array.dtype, array.strides
        offset = array.data.ptr - array.base.data.ptr

        def make(root: Any) -> Any:
            return cupy.ndarray(shape, dtype, root.data + offset, strides)

        return array.base, make
    return None


def _numpy_view(array: np.ndarray[Any, Any]) -> View | None:
    root = root_of(array)
    if root is array or not (root.flags.c_contiguous or root.flags.f_contiguous):
        return None
    shape, dtype, strides = array.shape, array.dtype, array.strides
    offset = address_of(array) - address_of(root)

    def make(root: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        # All axes in one, of any order: NumPy makes arrays on C-contiguous buffers alone.
        flat = root.reshape(-1, order="A").view(np.uint8)
        return np.ndarray(shape, dtype, flat, offset, strides)

    return root, make

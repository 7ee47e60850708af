"""The layout of a field: what a plan is made for, and what each call's arrays must have."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.window import Window

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Layout:
    """How the elements of an array lie in memory.

    Attributes
    ----------
    shape : tuple of int
        Elements along each axis.
    strides : tuple of int, bytes
        Along each axis; none negative.
    dtype : numpy.dtype
        Of the elements.
    device : int or None
        The ordinal of the GPU; None in host memory.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    device: int | None

    @property
    def span_nbytes(self) -> int:
        """From the first byte of the first element to the last byte of the last."""
        if 0 in self.shape:
            return 0
        steps = sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        return steps + self.dtype.itemsize

    @cached_property
    def is_plain(self) -> bool:
        """Whether its elements are numbers, which NumPy copies fastest as they are."""
        return self.dtype.kind in "biufc"

    @cached_property
    def carrier(self) -> np.dtype[Any]:
        """The dtype in which elements travel: their own, or bytes where that is compound."""
        return self.dtype if self.is_plain else np.dtype(f"V{self.dtype.itemsize}")

    def is_like(self, other: Layout) -> bool:
        """Whether an array of the other layout can take this one's place."""
        return (self.shape, self.dtype, self.device) == (
            other.shape,
            other.dtype,
            other.device,
        ) and (
            all(
                extent < 2 or mine == theirs
                for extent, mine, theirs in zip(
                    self.shape, self.strides, other.strides, strict=True
                )
            )
        )

    def difference(self, other: Layout) -> str:
        """Return how `other` differs from this layout, for an error."""
        names = ("shape", "strides", "dtype", "device")
        differing = [
            f"{name} {getattr(other, name)} instead of {getattr(self, name)}"
            for name in names
            if getattr(other, name) != getattr(self, name)
        ]
        return ", ".join(differing)

    def require(self, other: Layout) -> None:
        """Raise `ValueError` unless an array of the other layout can take this one's place."""
        # An axis of one element, or none, may have any stride.
        if not self.is_like(other):
            raise ValueError(
                "a field has another layout than the plan was made for: " + self.difference(other)
            )


def is_on_gpu(field: Any) -> bool:
    """Whether an array, of whatever library, is in GPU memory."""
    if isinstance(field, np.ndarray):
        return False
    return bool(getattr(field, "is_cuda", None) or _has_interface(field))


def _has_interface(field: Any) -> bool:
    # Raises AttributeError for a tensor in host memory, as for anything but an array on a GPU.
    return not hasattr(field, "is_cuda") and hasattr(field, "__cuda_array_interface__")


def as_numpy(field: Any, name: str) -> np.ndarray[Any, Any]:
    """Return the same memory as a NumPy array; `TypeError` where that cannot be. Local."""
    if isinstance(field, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, whose mask cannot travel: give its .data")
    if isinstance(field, np.ndarray):
        return np.asarray(field)  # a subclass may keep cells from being written
    if getattr(field, "requires_grad", False):
        raise ValueError(f"{name} requires a gradient, which a halo exchange does not have")
    if isinstance(field, list | tuple | int | float | str | bytes) or field is None:
        raise TypeError(f"{name} is not an array but of type {type(field).__name__}")
    try:
        return np.from_dlpack(field)
    except (AttributeError, TypeError, BufferError, RuntimeError) as error:
        raise TypeError(f"{name} is not an array that NumPy can read: {error}") from error


def host_layout(array: np.ndarray[Any, Any], name: str) -> Layout:
    """Return the layout of an array in host memory, or raise where no ghosts can be written."""
    if not array.flags.writeable:
        raise ValueError(f"{name} is read-only")
    return check_layout(Layout(array.shape, array.strides, array.dtype, None), name)


def check_layout(layout: Layout, name: str) -> Layout:
    """Return a layout in which cells can be written one by one; else raise."""
    if layout.dtype.hasobject:
        raise TypeError(f"{name} holds Python objects, which cannot travel")
    if not 1 <= layout.dtype.itemsize <= 16:
        raise TypeError(
            f"{name} has elements of {layout.dtype.itemsize} bytes: 1 to 16 are allowed"
        )
    pairs = zip(layout.shape, layout.strides, strict=True)
    if any(extent > 1 and step <= 0 for extent, step in pairs):
        raise ValueError(f"{name} has strides {layout.strides}: they must be positive")
    return layout


def require_number(fields: Sequence[Any], wanted: int) -> None:
    """Raise `ValueError` unless a call has as many fields as the plan was made for. Local."""
    if len(fields) != wanted:
        hint = ""
        if len(fields) == 1 and isinstance(fields[0], list | tuple):
            hint = ": pass the arrays one by one, exchange(*fields)"
        raise ValueError(f"{len(fields)} fields given, the plan was made for {wanted}{hint}")


def as_list(fields: Any) -> list[Any]:
    """Return one array, or a list or tuple of them, as a list. A window stands for its array."""
    found: Sequence[Any] = fields if isinstance(fields, list | tuple) else [fields]
    if not found:
        raise ValueError("fields is empty: a plan is made for one array at least")
    return [field.array if isinstance(field, Window) else field for field in found]

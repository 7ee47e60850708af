"""Tensors of PyTorch as the fields of replays."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from mpishare.memory.numbers import dtype_named

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from mpishare.plans.layout import FieldLayout


class TensorAddresses:
    """The addresses of tensors of these layouts; with none of these there are no addresses.

    Unlike CuPy's arrays, tensors may get other memory, and tell of it at once: none is remembered.
    """

    def __init__(self, layouts: Sequence[FieldLayout]) -> None:
        wanted = {each: _wanted(each) for each in dict.fromkeys(layouts)}
        self._wanted = [wanted[each] for each in layouts]

    def of(self, fields: Sequence[Any]) -> tuple[int, ...] | None:
        """Return those of a call; None if a field is no such tensor, or needs the slow path."""
        torch = sys.modules.get("torch")
        if torch is None or len(fields) != len(self._wanted):
            return None
        addresses = []
        for field, (kind, strides) in zip(fields, self._wanted, strict=True):
            if type(field) is not torch.Tensor or _kind_of(field, torch) != kind:
                return None
            if strides is not None and field.stride() != strides:
                return None
            addresses.append(field.data_ptr())
        return tuple(addresses)


def _wanted(layout: FieldLayout) -> tuple[Any, tuple[int, ...] | None]:
    """Return the `_kind_of` a tensor with this layout, and its strides; None for any strides."""
    kind = True, layout.shape, layout.dtype, layout.device, True, False, False, False
    return kind, None if 0 in layout.shape else _in_elements(layout)


def _in_elements(layout: FieldLayout) -> tuple[int, ...]:
    """Return the strides of a tensor with this layout, those of no tensor if there is none."""
    nbytes = layout.dtype.itemsize
    is_one = all(step % nbytes == 0 for step in layout.strides)
    return tuple(step // nbytes for step in layout.strides) if is_one else (0, *layout.strides)


def _kind_of(field: Any, torch: Any) -> tuple[Any, ...]:
    """Return all but the strides, which sparse tensors lack."""
    dtype = dtype_of(field.dtype)
    return (
        dtype is not None,  # for NumPy None equals float64
        field.shape,
        dtype,
        field.get_device(),
        field.layout is torch.strided,
        field.requires_grad,
        field.is_conj(),
        field.is_neg(),
    )


@functools.cache
def dtype_of(dtype: Any) -> np.dtype[Any] | None:
    """Return NumPy's dtype of one of PyTorch's, None if there is none."""
    try:
        return dtype_named(str(dtype).removeprefix("torch."))
    except TypeError:
        return None


def current_stream(device: int | None) -> int:
    """Return the handle of PyTorch's current stream, where PyTorch was imported."""
    return int(sys.modules["torch"].cuda.current_stream(device).cuda_stream)

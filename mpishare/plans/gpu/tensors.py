"""Tensors of PyTorch as the fields of replays."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from mpishare.memory.numbers import dtype_named
from mpishare.plans.gpu.graphs import key_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from mpishare.plans.layout import FieldLayout


class TensorKeys:
    """The keys of tensors of these layouts; with none of these there are no keys.

    Unlike CuPy's arrays, tensors may get other memory, and tell of it at once: none is remembered.
    """

    def __init__(self, layouts: Sequence[FieldLayout]) -> None:
        self._wanted: list[tuple[Any, tuple[int, ...] | None]] = []
        for each in layouts:
            kind = each.shape, each.dtype, each.device, True, False, False, False
            strides = tuple(step // each.dtype.itemsize for step in each.strides)
            self._wanted.append((kind, None if 0 in each.shape else strides))

    def key(self, fields: Sequence[Any]) -> Any:
        """Return the key of tensors; None if one is of another layout or needs the slow path."""
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
        return key_of(tuple(addresses))


def _kind_of(field: Any, torch: Any) -> tuple[Any, ...]:
    """Return all but the strides, which sparse tensors lack."""
    return (
        field.shape,
        dtype_of(field.dtype),
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

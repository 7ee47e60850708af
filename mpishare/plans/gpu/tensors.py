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
        self._layouts = [
            (
                each.shape,
                tuple(step // each.dtype.itemsize for step in each.strides),
                each.dtype,
                each.device,
            )
            for each in layouts
        ]

    def key(self, fields: Sequence[Any]) -> Any:
        """Return the key of tensors; None if one is of another layout or needs the slow path."""
        torch = sys.modules.get("torch")
        if torch is None or len(fields) != len(self._layouts):
            return None
        addresses = []
        for field, (shape, strides, dtype, device) in zip(fields, self._layouts, strict=True):
            if type(field) is not torch.Tensor or field.layout is not torch.strided:
                return None
            is_like = (
                field.shape == shape
                and (field.stride() == strides or 0 in shape)
                and field.get_device() == device
                and dtype_of(field.dtype) == dtype
            )
            if not is_like or field.requires_grad or field.is_conj() or field.is_neg():
                return None
            addresses.append(field.data_ptr())
        return key_of(tuple(addresses))


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

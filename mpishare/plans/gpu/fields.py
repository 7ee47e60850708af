"""Fields in GPU memory: their layouts, their addresses, and their library's current stream."""

from __future__ import annotations

import sys
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import cupy
import numpy as np

from mpishare.backends import handle_of
from mpishare.backends.cuda_streams import borrowed, on_stream
from mpishare.plans.gpu.tensors import dtype_of
from mpishare.plans.layout import (
    FieldLayout,
    array_of,
    check_layout,
    is_tensor,
    refuse_gradient,
    refuse_jax,
    require_ints,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

_Array = cupy.ndarray


def cuda_layout(field: Any, name: str) -> FieldLayout:
    """Return the layout of an array in GPU memory, or raise if its ghosts cannot be written."""
    return check_layout(place_of(field, name)[1], name)


def place_of(field: Any, name: str, *, is_written: bool = True) -> tuple[int, FieldLayout]:
    if isinstance(field, _Array):
        layout = FieldLayout(field.shape, field.strides, field.dtype, field.data.device_id)
        return field.data.ptr, layout
    return _inspect(field, name, is_written=is_written)


class DeviceScalar(NamedTuple):
    """An int in GPU memory, which the call holds."""

    address: int
    nbytes: int
    held: Any


def scalar_of(value: Any, name: str) -> DeviceScalar:
    """Return an int of 4 or 8 bytes in GPU memory, or raise `TypeError`."""
    address, layout = place_of(value, name)
    if prod(layout.shape) != 1 or layout.dtype not in (np.int32, np.int64):
        raise TypeError(
            f"{name} must be one int32 or int64, not {layout.dtype} of shape {layout.shape}"
        )
    return DeviceScalar(address, layout.dtype.itemsize, value)


def ints_of(array: Any, name: str) -> tuple[int, int, int]:
    """Return the address of int32 or int64 along one axis, how many they are, and bytes of each."""
    address, layout = place_of(array, name)
    require_ints(layout, name)
    if not layout.is_packed("C"):
        raise ValueError(f"{name} are not contiguous: give a copy")
    return address, layout.shape[0], layout.dtype.itemsize


def addresses_of(
    fields: Sequence[Any], layouts: Sequence[FieldLayout], name: str = "a field"
) -> tuple[int, ...]:
    """Return the addresses of a call's fields; `ValueError`, by that name, if a layout differs."""
    found = []
    for field, expected in zip(fields, layouts, strict=True):
        if isinstance(field, _Array):
            if (
                field.shape != expected.shape
                or field.strides != expected.strides
                or field.dtype != expected.dtype
                or field.data.device_id != expected.device
            ):
                expected.require(cuda_layout(field, name), name)
            found.append(field.data.ptr)
        else:
            address, seen = _inspect(field, name)
            if seen != expected:
                expected.require(seen, name)
            found.append(address)
    return tuple(found)


def current_stream(fields: Sequence[Any], device: int) -> Any:
    """Return the current stream of the library of the fields; None for CuPy's."""
    are_tensors = {is_tensor(field) for field in fields}
    if True not in are_tensors:
        return None
    stream = sys.modules["torch"].cuda.current_stream(device)
    if False in are_tensors and stream.cuda_stream != cupy.cuda.get_current_stream(device).ptr:
        raise ValueError(
            "these are arrays of CuPy and of PyTorch, whose current streams differ: make one "
            "stream current in both, or give stream= where the call takes it"
        )
    return stream


def with_current(stream: Any, array: Any) -> Any:
    """Make a stream the current one of the library of an array, within the block."""
    if is_tensor(array):
        cuda = sys.modules["torch"].cuda
        return cuda.stream(cuda.ExternalStream(handle_of(stream), array.device))
    return on_stream(borrowed(handle_of(stream)))


def is_captured(fields: Sequence[Any], stream: Any, backend: Any) -> bool:
    stream = current_stream(fields, backend.device.ordinal) if stream is None else stream
    return bool(backend.enter(stream)[3])


def _inspect(field: Any, name: str, *, is_written: bool = True) -> tuple[int, FieldLayout]:
    """Return the address and the layout of an array of another library, or of a window."""
    field = array_of(field)
    refuse_gradient(field, name)
    if is_tensor(field):
        kind = dtype_of(field.dtype)
        if kind is None:
            raise TypeError(f"{name} has dtype {field.dtype}, which NumPy does not know")
        if field.is_conj() or field.is_neg():
            raise ValueError(
                f"{name} is a conjugate or negative view, whose memory has other values: give its "
                ".resolve_conj() and .resolve_neg()"
            )
        shape, device = tuple(field.shape), field.device.index
        strides = tuple(step * kind.itemsize for step in field.stride())
        return field.data_ptr(), FieldLayout(shape, strides, kind, device)
    refuse_jax(field, name)
    try:
        interface = field.__cuda_array_interface__
    except (AttributeError, RuntimeError, TypeError) as error:
        raise TypeError(f"{name} is not an array in GPU memory: {error}") from error
    address, is_read_only = interface["data"]
    if is_read_only and is_written:
        raise ValueError(f"{name} is read-only, and the call writes into it: give a copy")
    array = cupy.asarray(field)
    return address, FieldLayout(array.shape, array.strides, array.dtype, array.data.device_id)

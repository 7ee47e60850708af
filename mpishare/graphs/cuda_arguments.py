"""The key of a graph among those of a captured function: its arguments."""

from __future__ import annotations

import sys
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from mpishare.plans.layout import array_of, is_tensor

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

_Array = cupy.ndarray
# The properties of a CuPy array that a graph depends on. Not the dtype itself, whose hash takes as
# long as all of the others.
identity = attrgetter("data.ptr", "shape", "strides", "dtype.char")


def key_of(arguments: Sequence[Any], name: str) -> Hashable:
    """Return the key of a graph; `TypeError` if an argument is neither on the GPU nor hashable."""
    return tuple(
        [identity(each) if type(each) is _Array else _key(each, name) for each in arguments]
    )


def _key(value: Any, name: str) -> Hashable:
    value = array_of(value)
    if isinstance(value, _Array):
        return identity(value)
    if isinstance(value, (tuple, list)):
        return type(value), key_of(value, name)
    if is_tensor(value):
        if not value.is_cuda:
            raise TypeError(f"{name} failed: a tensor on {value.device} is not in GPU memory")
        return value.data_ptr(), tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, np.ndarray):
        raise TypeError(
            f"{name} failed: an argument is a NumPy array, whose values a replay would not read "
            "again. Pass a CuPy array, or numbers."
        )
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is not None:
        strides = interface.get("strides")
        return interface["data"][0], interface["shape"], strides, interface["typestr"]
    try:
        hash(value)
    except TypeError as error:
        raise TypeError(
            f"{name} failed: an argument is neither an array in GPU memory nor hashable: {error}"
        ) from None
    return type(value), value  # True and 1.0 are equal to 1


def current_stream(arguments: Sequence[Any], device: int, name: str) -> Any:
    """Return the current stream of the arguments' library; None for CuPy's."""
    if "torch" not in sys.modules:
        return None
    are_tensors = {is_tensor(each) for each in _arrays(arguments)}
    if True not in are_tensors:
        return None
    stream = sys.modules["torch"].cuda.current_stream(device)
    if False in are_tensors and stream.cuda_stream != cupy.cuda.get_current_stream(device).ptr:
        raise ValueError(
            f"{name} failed: the arguments are arrays of CuPy and of PyTorch, whose current "
            "streams differ. Make one stream current in both."
        )
    return stream


def _arrays(arguments: Sequence[Any]) -> list[Any]:
    found = []
    for each in arguments:
        if isinstance(each, (tuple, list)):
            found += _arrays(each)
        elif is_tensor(array := array_of(each)) or hasattr(array, "__cuda_array_interface__"):
            found.append(array)
    return found

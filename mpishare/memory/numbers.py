"""The numbers that mpishare computes with: the one table of dtypes, for NumPy, C and kernels.

Elements of every other dtype travel as they are. C has its loops by the same names
(`native/numbers.h`), kernels by the same types (`plans/gpu/numbers.cuh`).
"""

from __future__ import annotations

import functools
import sys
from typing import Any, NamedTuple

import numpy as np


class Number(NamedTuple):
    """One kind of numbers."""

    name: str  # of its dtype
    kind: str  # as that of a dtype
    kernel: str  # its type in kernels
    added_as: str  # the number, or the pair of them, whose sums have the same bits


_TABLE = (
    Number("bool", "b", "unsigned char", ""),
    Number("int8", "i", "signed char", "uint8"),
    Number("int16", "i", "short", "uint16"),
    Number("int32", "i", "int", "uint32"),
    Number("int64", "i", "long long", "uint64"),
    Number("uint8", "u", "unsigned char", "uint8"),
    Number("uint16", "u", "unsigned short", "uint16"),
    Number("uint32", "u", "unsigned int", "uint32"),
    Number("uint64", "u", "unsigned long long", "uint64"),
    Number("float16", "f", "Half", "float16"),
    Number("bfloat16", "f", "Bfloat16", "bfloat16"),
    Number("float32", "f", "float", "float32"),
    Number("float64", "f", "double", "float64"),
    Number("complex64", "c", "Complex<float>", "float32"),
    Number("complex128", "c", "Complex<double>", "float64"),
)
NUMBERS = {number.name: number for number in _TABLE}
ADDED = tuple(dict.fromkeys(number.added_as for number in _TABLE if number.added_as))
"""Whose sums kernels know, by their places here."""


@functools.lru_cache(256)
def number_of(dtype: np.dtype[Any]) -> Number | None:
    """Return the number that elements of a dtype are, in the byte order of the machine."""
    return NUMBERS.get(dtype.name) if dtype.isnative else None


def added_in_c(module: Any, dtype: np.dtype[Any]) -> str | None:
    """Return the name by which C adds elements of a dtype; None if it does not."""
    number = number_of(dtype)
    return number.name if number is not None and module.can_add(number.name) else None


_BFLOAT16_AS_BYTES = np.dtype("V2")


@functools.cache
def _bfloat16() -> np.dtype[Any]:
    """Return the dtype of ml_dtypes, which adds them in NumPy; without it, bytes that travel."""
    try:
        from ml_dtypes import bfloat16
    except ModuleNotFoundError:
        return _BFLOAT16_AS_BYTES
    dtype: np.dtype[Any] = np.dtype(bfloat16)
    return dtype


def dtype_named(name: str) -> np.dtype[Any]:
    """Return the dtype of a tensor; `TypeError` if NumPy has none of this name."""
    return _bfloat16() if name == "bfloat16" else np.dtype(name)


def exchangeable(field: Any) -> Any:
    """Return an array that NumPy and CuPy take: of int16 for a tensor of bfloat16."""
    torch = sys.modules.get("torch")
    if torch is None or getattr(field, "dtype", None) is not torch.bfloat16:
        return field
    return field.view(torch.int16)


def on_memory_of(field: Any) -> np.ndarray[Any, Any]:
    """Return a NumPy array on the memory of an array of another library."""
    known = exchangeable(field)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(known, torch.Tensor):
        array: np.ndarray[Any, Any] = known.numpy()  # a tenth of the time of DLPack
    else:
        array = np.from_dlpack(known)
    return array if known is field else array.view(_bfloat16())


def why_not_added(dtype: np.dtype[Any]) -> str:
    """Return why elements cannot be added, not even on the host; empty if they can."""
    number = number_of(dtype)
    # NumPy adds others than those of the table.
    if dtype.kind in "iufc" if number is None else number.added_as:
        return ""
    if dtype == _BFLOAT16_AS_BYTES:
        return f"{dtype} cannot be added (bfloat16 of PyTorch can where ml_dtypes is installed)"
    return f"{dtype} cannot be added" + as_numbers(dtype)


def as_numbers(dtype: np.dtype[Any]) -> str:
    """Return how elements that are not of `NUMBERS` are given as such, for the end of an error."""
    if dtype.names:
        return f". Give the numbers of a record field by field, such as x[{dtype.names[0]!r}]"
    if not dtype.isnative and number_of(dtype.newbyteorder("=")):
        return ". Give it in the machine's, x.astype(x.dtype.newbyteorder('='))"
    return ""

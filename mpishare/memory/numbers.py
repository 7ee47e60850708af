"""The numbers that mpishare computes with: the one table of dtypes, for NumPy, C and kernels.

Elements of every other dtype travel as they are. C has its loops by the same names
(`backends/native/numbers.h`), kernels by the same types (`plans/gpu/numbers.cuh`).
"""

from __future__ import annotations

import functools
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
    Number("float32", "f", "float", "float32"),
    Number("float64", "f", "double", "float64"),
    Number("complex64", "c", "Complex<float>", "float32"),
    Number("complex128", "c", "Complex<double>", "float64"),
)
NUMBERS = {number.name: number for number in _TABLE}
ADDED = tuple(dict.fromkeys(number.added_as for number in _TABLE if number.added_as))
"""Whose sums kernels know; `EACH_ADDED` of numbers.cuh has the same order."""


@functools.lru_cache(256)
def number_of(dtype: np.dtype[Any]) -> Number | None:
    """Return the number that elements of a dtype are, in the byte order of the machine."""
    return NUMBERS.get(dtype.name) if dtype.isnative else None


def dtype_named(name: str) -> np.dtype[Any]:
    """Return the dtype of a tensor; `TypeError` if NumPy has none of this name."""
    if name == "bfloat16":
        return np.dtype("V2")  # travels as bytes: NumPy has no such dtype
    return np.dtype(name)


def can_add(dtype: np.dtype[Any]) -> bool:
    """Whether elements can be added on the host at least: NumPy knows others than this table."""
    number = number_of(dtype)
    return dtype.kind in "iufc" if number is None else bool(number.added_as)

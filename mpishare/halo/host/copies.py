"""The fields of a call in host memory: found by their addresses, and stored into by NumPy."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.halo.layout import FieldLayout

Array = np.ndarray[Any, Any]


class HostCall(NamedTuple):
    """A prepared call: its fields, held until `wait` is over, and their addresses.

    The arrays are in the dtypes in which cells travel.
    """

    arrays: Sequence[Array]
    addresses: tuple[int, ...]


def put(array: Array, key: Any, cells: Array) -> None:
    """Overwrite cells with the received ones."""
    array[key] = cells


def add(array: Array, key: Any, cells: Array) -> None:
    """Add the received cells; where an index occurs twice, both are added, in order."""
    if all(isinstance(item, slice) for item in key):
        target = array[key]
        np.add(target, cells, out=target)
    else:
        np.add.at(array, key, cells)


def array_at(address: int, layout: FieldLayout) -> Array:
    """Return the array at an address, in the dtype in which its cells travel.

    It does not hold the memory: a window could not be unmapped otherwise.
    """
    cells = (ctypes.c_char * layout.span_nbytes).from_address(address)
    return np.ndarray(
        layout.shape, layout.carrier, buffer=memoryview(cells), strides=layout.strides
    )


def address_of(array: Array) -> int:
    """Return the address of the first element."""
    address: int = array.__array_interface__["data"][0]
    return address

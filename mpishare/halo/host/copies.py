"""The fields of a call in host memory, and how NumPy stores cells in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

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

"""What a call is given: columns like those of the plan, and rows for its peers."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpishare.memory.arguments import is_int

if TYPE_CHECKING:
    from mpishare.rows.form import Column


class Span(NamedTuple):
    """The rows that go to a peer: from `low` to `high`, of `numbers` where these are given."""

    low: Any
    high: Any  # None for all numbers
    numbers: Any = None


def require_like(array: Any, column: Column, number: int, *, is_contiguous: bool) -> None:
    """Raise unless an array is a column of the plan, in C order."""
    shape = tuple(array.shape)
    if array.dtype != column.dtype or shape[1:] != column.shape or not shape:
        raise ValueError(f"column {number} has {array.dtype}{[*shape]}, the plan {column} a row")
    if not is_contiguous:
        raise ValueError(f"column {number} is not contiguous in C order: give a copy")


def require_count(array: Any) -> None:
    """Raise unless an array is a count that can be updated."""
    if array.dtype != np.int64 or array.shape != ():
        raise TypeError(
            f"count is an int, or int64 of shape (), not {array.dtype}{list(array.shape)}"
        )


def int_of(number: Any, name: str) -> int:
    """Return a number that the host has as an int."""
    if type(number) is int:
        return number
    if not is_int(number):
        raise TypeError(f"{name} is an int, or a scalar of the columns' memory, not {number!r}")
    return index(number)


def spans_of(places: Mapping[Any, int], given: Mapping[Any, Any]) -> dict[int, Span]:
    """Return the rows of keys as spans by the places of the keys."""
    require_peers(places, given)
    return {places[name]: _span_of(rows) for name, rows in given.items()}


def require_peers(places: Mapping[Any, int], given: Mapping[Any, Any]) -> None:
    """Raise `ValueError` for keys that are no peers."""
    if not isinstance(given, Mapping):
        raise TypeError(f"a dict by peer is needed, not {type(given).__name__}")
    if not given.keys() <= places.keys():
        raise ValueError(f"{[*given.keys() - places.keys()]} are no peers: these are {[*places]}")


def _span_of(rows: Any) -> Span:
    if isinstance(rows, tuple):
        if len(rows) != 2:
            raise ValueError(f"rows are (low, high), numbers, or (numbers, n), not {rows!r}")
        first, second = rows
        is_numbered = len(getattr(first, "shape", ())) == 1
        return Span(0, second, first) if is_numbered else Span(first, second)
    if not hasattr(rows, "shape"):
        raise TypeError(f"rows are (low, high), or an array of row numbers, not {rows!r}")
    return Span(0, None, rows)

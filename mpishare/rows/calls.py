"""What a call is given: columns like those of the plan, and rows for its peers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpishare.rows.form import Column


class Span(NamedTuple):
    """The rows that go to a peer: from `low` to `high`, of `numbers` where these are given."""

    low: Any
    high: Any  # None for all numbers
    numbers: Any = None


def require_like(array: Any, column: Column, number: int, *, is_contiguous: bool) -> None:
    """Raise unless an array is a column of the plan, in C order."""
    if array.dtype != column.dtype or tuple(array.shape[1:]) != column.shape or not array.shape:
        raise ValueError(
            f"column {number} has {array.dtype}{list(array.shape)}, the plan {column} a row"
        )
    if not is_contiguous:
        raise ValueError(f"column {number} is not contiguous in C order: give a copy")


def spans_of(places: Mapping[Any, int], given: Mapping[Any, Any]) -> list[Span | None]:
    """Return the rows of each key as a span, given the places of the keys in order."""
    require_peers(places, given)
    return [_span_of(given[name]) if name in given else None for name in places]


def require_peers(places: Mapping[Any, int], given: Mapping[Any, Any]) -> None:
    """Raise `ValueError` for keys that are no peers."""
    if not given.keys() <= places.keys():
        raise ValueError(f"{[*given.keys() - places.keys()]} are no peers: these are {[*places]}")


def _span_of(rows: Any) -> Span:
    if isinstance(rows, tuple):
        if len(rows) != 2:
            raise ValueError(f"rows are (low, high), numbers, or (numbers, n), not {rows!r}")
        first, second = rows
        is_numbered = len(getattr(first, "shape", ())) == 1
        return Span(0, second, first) if is_numbered else Span(first, second)
    return Span(0, None, rows)

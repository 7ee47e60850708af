"""Plain values that users give: bools, ints, widths of ghosts, and seconds."""

from __future__ import annotations

import operator
from contextlib import suppress
from typing import Any

import numpy as np

# 31 years. Sockets and threads can wait for ten times that, and raise where it is more.
MAX_DURATION_S = 1e9


def require_bool(failed: str, name: str, value: Any) -> bool:
    """Return a bool, of NumPy too; `TypeError`, whose text begins with `failed`, for others."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{failed}{name} must be True or False, not {value!r}")
    return bool(value)


def is_int(value: Any) -> bool:
    """Whether a value is an int of Python or NumPy; a bool is none."""
    if isinstance(value, bool) or getattr(value, "ndim", 0) != 0:
        return False
    try:
        operator.index(value)  # arrays of floats have the method, too
    except TypeError:
        return False
    return True


def shape_of(given: Any) -> tuple[int, ...]:
    """Return a shape: an int, or a sequence of them, which may be an array of NumPy."""
    extents = [given] if is_int(given) else items_of(given)
    wrong = f"shape must be an int or ints of 0 or more, not {given!r}"
    if extents is None or not all(map(is_int, extents)):
        raise TypeError(wrong)
    shape = tuple(map(operator.index, extents))
    if min(shape, default=0) < 0:
        raise ValueError(wrong)
    return shape


def items_of(value: Any) -> list[Any] | None:
    """Return a sequence as a list; None for anything else, such as an array without axes."""
    with suppress(TypeError):
        return list(value)
    return None


def axes_of(name: str, given: Any, ndim: int) -> list[int]:
    """Return axes of a field, counted from its first one; `name` is that of the argument."""
    items = items_of(given)
    if items is None or not all(map(is_int, items)):
        raise TypeError(f"{name} must be ints that name axes, not {given!r}")
    for axis in items:
        if not -ndim <= axis < ndim:
            raise ValueError(f"{name} names axis {axis}, and there are {ndim}")
    axes = [operator.index(axis) % ndim for axis in items]
    if len({*axes}) < len(axes):
        raise ValueError(f"{name} names an axis twice: {given!r}")
    return axes


def ghosts_of(width: Any, naxes: int) -> tuple[tuple[int, int], ...] | None:
    """Return the ghosts at both ends of each axis, (low, high); None if `width` is none of these.

    An int is for all axes; else one int or pair an axis; with one axis a bare pair will do.
    """
    each = items_of(width) or [width] * naxes
    if naxes == 1 and len(each) == 2:
        each = [each]
    try:
        pairs = (items_of(item) or [item, item] for item in each)
        found = tuple((_count(low), _count(high)) for low, high in pairs)
    except (TypeError, ValueError):
        return None
    return found if len(found) == naxes else None


def _count(value: Any) -> int:
    if not is_int(value) or value < 0:
        raise TypeError(f"{value!r} counts nothing")
    return operator.index(value)


def is_duration(value: Any) -> bool:
    """Whether a value is a positive number of seconds that clocks can count."""
    return _is_number(value) and 0 < value <= MAX_DURATION_S


def require_wait(failed: str, wait_s: Any) -> None:
    """Raise as `require_duration`, unless a wait is a duration, 0 or inf."""
    if not (is_duration(wait_s) or (_is_number(wait_s) and wait_s in (0, float("inf")))):
        wanted = f"wait_s must be a number of seconds from 0 to {MAX_DURATION_S:g}, or inf"
        raise _error_of(wait_s)(f"{failed}{wanted}, not {wait_s!r}")


def require_duration(failed: str, timeout_s: Any) -> None:
    """Raise `TypeError` or `ValueError`, whose text begins with `failed`, if this is no timeout."""
    if not is_duration(timeout_s):
        wanted = f"timeout_s must be a positive number of seconds, at most {MAX_DURATION_S:g}"
        raise _error_of(timeout_s)(f"{failed}{wanted}, not {timeout_s!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _error_of(value: Any) -> type[Exception]:
    """Return the class of the error of a value that is no duration."""
    return ValueError if _is_number(value) else TypeError

"""Plain values that users give: bools, ints, and seconds."""

from __future__ import annotations

import operator
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

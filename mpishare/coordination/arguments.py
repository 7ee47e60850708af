"""Numbers that users give: ints, and seconds."""

from __future__ import annotations

from typing import Any

# 31 years. Sockets and threads can wait for ten times that, and raise where it is more.
MAX_DURATION_S = 1e9


def is_int(value: Any) -> bool:
    """Whether a value is an int of Python or NumPy; a bool is none."""
    # Arrays of NumPy have an index too, where they have one element.
    is_scalar = hasattr(value, "__index__") and getattr(value, "ndim", 0) == 0
    return is_scalar and not isinstance(value, bool)


def is_duration(value: Any) -> bool:
    """Whether a value is a positive number of seconds that clocks can count."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value <= MAX_DURATION_S


def require_wait(failed: str, wait_s: Any) -> None:
    """Raise `ValueError` as `require_duration`, unless a wait is a duration, 0 or inf."""
    if not (is_duration(wait_s) or (wait_s in (0, float("inf")) and not isinstance(wait_s, bool))):
        wanted = f"wait_s must be a number of seconds from 0 to {MAX_DURATION_S:g}, or inf"
        raise ValueError(f"{failed}{wanted}, not {wait_s!r}")


def require_duration(failed: str, timeout_s: Any) -> None:
    """Raise `ValueError`, whose text begins with `failed`, unless a timeout is a duration."""
    if not is_duration(timeout_s):
        wanted = f"timeout_s must be a positive number of seconds, at most {MAX_DURATION_S:g}"
        raise ValueError(f"{failed}{wanted}, not {timeout_s!r}")

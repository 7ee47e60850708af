"""What goes into a captured function and comes out of it."""

from __future__ import annotations

from typing import Any


def check_result(name: str, result: Any) -> Any:
    """Return the result of a captured function; `TypeError` if a replay could not renew it."""
    if result is not None:
        _check(name, result)
    return result


def _check(name: str, result: Any) -> None:
    if result is None or hasattr(result, "__dlpack__"):
        return
    if isinstance(result, (tuple, list)):
        for each in result:
            _check(name, each)
    elif isinstance(result, dict):
        for each in result.values():
            _check(name, each)
    else:
        raise TypeError(
            f"{name} failed: the function returned {result!r}, which no replay would compute "
            "again. Return arrays, or nothing."
        )

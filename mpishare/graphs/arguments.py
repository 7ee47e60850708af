"""Checks of the results of captured functions."""

from __future__ import annotations

from typing import Any


def check_result(name: str, result: Any, *, scalars: type | tuple[type, ...] = ()) -> Any:
    """Return the result of a captured function; `TypeError` if a replay could not renew it."""
    if result is not None:
        _check(name, result, scalars)
    return result


def _check(name: str, result: Any, scalars: type | tuple[type, ...]) -> None:
    if result is None or hasattr(result, "__dlpack__") or isinstance(result, scalars):
        return
    if isinstance(result, (tuple, list)):
        for each in result:
            _check(name, each, scalars)
    elif isinstance(result, dict):
        for each in result.values():
            _check(name, each, scalars)
    else:
        raise TypeError(
            f"{name} failed: the function returned {result!r}, which no replay would compute "
            "again. Return arrays, or nothing."
        )

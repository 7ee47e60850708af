"""Ranges on the timeline of a profiler, named ``mpishare.*``, around the calls that take time.

They are those of NVTX, by the package ``nvtx`` or else by CuPy. Where no tool listens a method is
the very function of its class: a call has no check to make, and no cost.
"""

from __future__ import annotations

import importlib
import logging
import os
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from mpishare.errors import UnsupportedError, warn_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    Library = tuple[Callable[[str], Any], Callable[[], Any]]

log = logging.getLogger("mpishare.ranges")

# A tool sets one of these environment variables: NVTX loads the first, Nsight the second.
TOOLS = ("NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")

_MISSING = "neither the package nvtx nor CuPy is installed, by which ranges are pushed"

_choice: bool | None = None


def enable(is_on: bool | None = True) -> None:
    """Enable or disable ranges around the calls of objects that are made from now on.

    Local.

    Parameters
    ----------
    is_on : bool, optional
        None is the default without this call: ranges only where a tool listens, as under ``nsys
        profile``.

    Raises
    ------
    UnsupportedError
        If they are enabled and neither package is there.
    """
    global _choice
    if is_on and _library() is None:
        raise UnsupportedError(f"ranges.enable failed: {_MISSING}. Install nvtx.")
    _choice = is_on


def bind(target: Any, *calls: str) -> None:
    """Put a range around methods of a new object, where ranges are enabled."""
    library = _wanted()
    if library is not None:
        for call in calls:
            around = _pushed(f"{type(target).__name__}.{call}", *library)
            setattr(target, call, around(getattr(target, call)))


def span(name: str) -> AbstractContextManager[None]:
    """Push a range around a block, where ranges are enabled. Not for hot paths."""
    library = _wanted()
    return nullcontext() if library is None else _pushed(name, *library)


@contextmanager
def _pushed(name: str, push: Callable[[str], Any], pop: Callable[[], Any]) -> Iterator[None]:
    push(f"mpishare.{name}")
    try:
        yield
    finally:
        pop()


def _wanted() -> Library | None:
    """Return the functions that push and pop, if objects made now are to have ranges."""
    is_on = any(map(os.environ.get, TOOLS)) if _choice is None else _choice
    found = _library() if is_on else None
    if is_on and found is None:
        warn_once(log, "a tool listens to NVTX ranges, but %s: there are none", _MISSING)
    return found


def _library() -> Library | None:
    if find_spec("nvtx") is not None:
        nvtx = importlib.import_module("nvtx")
        return nvtx.push_range, nvtx.pop_range
    if find_spec("cupy") is not None:
        nvtx = importlib.import_module("cupy.cuda").nvtx
        if nvtx.available:
            return nvtx.RangePush, nvtx.RangePop
    return None

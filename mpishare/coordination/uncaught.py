"""Printing of an exception that ends a program with a node: short, and by its own rank alone.

One rank's failure ends the calls of all others. Their tracebacks would bury the one that matters.
"""

from __future__ import annotations

import sys
import traceback
from itertools import dropwhile, takewhile
from types import TracebackType
from typing import Any

from mpishare.coordination.abort import say
from mpishare.errors import MpiShareError, PeerError, describe

_LAUNCHERS = ("runpy", "mpi4py")
_OWN = __name__.partition(".")[0]
_INNER = (_OWN, "contextlib")  # which runs the blocks of mpishare
_previous: list[Any] = []
_printed: list[BaseException] = []


def install() -> None:
    """Install a hook for uncaught exceptions, which calls the hook before it."""
    if not _previous:
        _previous.append(sys.excepthook)
        sys.excepthook = _print


def uncaught() -> BaseException | None:
    """Return the exception that ends this program; None at an orderly exit or a prompt.

    Not `sys.last_value`, which pytest and others set to exceptions that end a part of a program.
    """
    if sys.flags.interactive or hasattr(sys, "ps1"):
        return None  # raised by an earlier input
    return _printed[-1] if _printed else None


def _print(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _printed[:] = [error]
    if getattr(error, "is_brief", False):  # its words are all that helps
        say(f"mpishare: {error}\n")
        return
    if type(error) is PeerError or getattr(error, "_is_told_elsewhere", False):
        say(f"mpishare: rank {_rank()}{_place(trace)}: {describe(error)}\n")
        return
    short = shorten(error, trace)
    error = error.with_traceback(short)
    if _previous[0] is sys.__excepthook__:
        say("".join(traceback.format_exception(error)))  # at once, so that ranks do not interleave
    else:
        _previous[0](kind, error, short)


def shorten(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of the launcher and of the inside of mpishare.

    Of mpishare the frame that the user called stays, and none where the user's own callable raised.
    All stay where an unforeseen error was raised in mpishare itself.
    """
    frames = _frames(trace)
    theirs = [frame for frame in frames if _package(frame) not in _INNER]
    if frames and _package(frames[-1]) not in _INNER:
        frames = theirs
    elif isinstance(error, MpiShareError | TypeError | ValueError):
        called = next((frame for frame in frames if _package(frame) == _OWN), None)
        frames = theirs if called is None else [*theirs, called]
    found = None
    for frame in reversed(frames):
        found = TracebackType(found, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return found


def _frames(trace: TracebackType | None) -> list[TracebackType]:
    """Return the frames of a traceback without those of the launcher."""
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    return [*dropwhile(lambda frame: _package(frame) in _LAUNCHERS, frames)]


def _package(trace: TracebackType) -> str:
    names = trace.tb_frame.f_globals
    return str(names.get("__package__") or names.get("__name__", "")).partition(".")[0]


def _place(trace: TracebackType | None) -> str:
    """Return the line of the user's that called mpishare, as words behind a rank."""
    before = takewhile(lambda frame: _package(frame) != _OWN, _frames(trace))
    places = [frame for frame in before if _package(frame) not in _INNER]
    if not places:
        return ""
    return f" ({places[-1].tb_frame.f_code.co_filename}, line {places[-1].tb_lineno})"


def _rank() -> int:
    from mpi4py import MPI

    return -1 if MPI.Is_finalized() else int(MPI.COMM_WORLD.rank)

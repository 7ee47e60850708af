"""The exception that ends a program with a node: one line says where, before any traceback.

The ranks that only hear of it print no traceback of their own, which would bury the one that
matters.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from itertools import dropwhile, filterfalse
from typing import TYPE_CHECKING, Any

from mpishare.coordination.abort import say, wait_briefly
from mpishare.coordination.code_of import is_of_user, is_own
from mpishare.coordination.control_block import Mark
from mpishare.coordination.waits import of_this_thread
from mpishare.errors import MpiShareError, PeerError, describe, is_failing_exit

if TYPE_CHECKING:
    from types import TracebackType

_MOST_LINES = 3  # of the text of an error, in its rank's line
# The time that a rank which failed first has to print its own error.
_FIRST_S = 0.5
_previous: list[Any] = []
_ending: list[BaseException] = []


def install() -> None:
    """Install a hook for uncaught exceptions, which calls the hook before it."""
    if not _previous:
        _previous.append(sys.excepthook)
        sys.excepthook = _print


def restore() -> None:
    """Put the hook before ours back, unless another one stands before ours."""
    if _previous and sys.excepthook is _print:
        sys.excepthook = _previous.pop()


os.register_at_fork(after_in_child=restore)  # a child is no rank


def uncaught() -> BaseException | None:
    """Return the exception that ends this program; None at an orderly exit or a prompt."""
    return _ending[-1] if _ending else None


def say_exit(error: BaseException) -> None:
    """Say once where a program leaves its node by `sys.exit`: Python has no hook for it."""
    if is_failing_exit(error) and not getattr(error, "_is_said", False):
        error._is_said = True  # type: ignore[attr-defined]
        say(f"{_line(error, error.__traceback__)}\n")


def _line(error: BaseException, trace: TracebackType | None) -> str:
    """Return one line: this rank, the place of an exception in the program, and its text."""
    text = " ".join(describe(error).split("\n", _MOST_LINES)[:_MOST_LINES])
    return f"mpishare: rank {_rank()}: {_place(trace)}: {text}"


def _print(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    # Python keeps the exception that ends a program; some programs print others by this hook.
    is_kept = getattr(sys, "last_value", None) is error
    if not is_kept or sys.flags.interactive or hasattr(sys, "ps1"):
        _previous[0](kind, error, trace)
        return
    _ending[:] = [error]
    if getattr(error, "is_brief", False):  # its words are all that helps
        say(f"mpishare: {error}\n")
        return
    line = _line(error, trace)
    if type(error) is PeerError or getattr(error, "_is_told_elsewhere", False):
        _let_first_speak(error)
        say(f"{line}\n")
        return
    short = _shortened(error, trace)
    error = error.with_traceback(short)
    if _previous[0] is sys.__excepthook__:
        # At once, so that ranks do not interleave.
        say("".join([line, "\n", *traceback.format_exception(error)]))
    else:
        say(f"{line}\n")
        _previous[0](kind, error, short)


def _let_first_speak(error: BaseException) -> None:
    """Wait a moment until the ranks that caused an error have printed it, and end."""
    causes = getattr(error, "ranks", ())
    blocks = [node.block for node in of_this_thread()]
    waits = [(block, rank) for block in blocks for rank in causes if rank < block.size]
    wait_briefly(lambda: all(block.is_past(Mark.ENDING, rank) for block, rank in waits), _FIRST_S)


def _shortened(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    """Cut the frames of launchers and of the inside of mpishare out of a traceback.

    Of mpishare the frame that the user called stays where mpishare itself refused the call, and all
    where it was an error that we did not foresee.
    """
    frames = _frames(trace)
    own, theirs = [*filter(_is_inner, frames)], [*filterfalse(_is_inner, frames)]
    if own and own[-1] is not frames[-1]:
        frames = theirs
    elif own and isinstance(error, MpiShareError | TypeError | ValueError):
        frames = [*theirs, own[0]]
    frames = [*dropwhile(lambda frame: not is_of_user(_name(frame)), frames)] or frames
    for frame, following in zip(frames, [*frames[1:], None], strict=True):
        frame.tb_next = following
    return frames[0] if frames else None


def _frames(trace: TracebackType | None) -> list[TracebackType]:
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    return frames


def _name(frame: TracebackType) -> str:
    return frame.tb_frame.f_code.co_filename


def _is_inner(frame: TracebackType) -> bool:
    # Blocks of mpishare run through `contextlib`.
    return is_own(_name(frame)) or _name(frame) == contextlib.__file__


def _place(trace: TracebackType | None) -> str:
    """Return the innermost line of the user's program, or of any where none is the user's."""
    frames = _frames(trace)
    theirs = (frame for frame in reversed(frames) if is_of_user(_name(frame)))
    frame = next(theirs, frames[-1] if frames else None)
    return "no line" if frame is None else f"{_name(frame)}, line {frame.tb_lineno}"


def _rank() -> int:
    from mpi4py import MPI

    return -1 if MPI.Is_finalized() else int(MPI.COMM_WORLD.rank)

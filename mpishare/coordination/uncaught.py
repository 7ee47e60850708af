"""The exception that ends a program with a node: Python keeps it, and one line says where it was.

The traceback is Python's own, of every rank. So the rank whose error it is repeats it at its end.
"""

from __future__ import annotations

import sys
import traceback
from typing import Any

from mpishare.coordination.abort import say
from mpishare.coordination.where import is_of_user
from mpishare.errors import PeerError, describe, is_failing_exit

_MOST_LINES = 3  # of the text of an error
# The outermost function of a program, and of one that `python -m` starts.
_PROGRAMS = ("<module>", "_run_module_as_main")


def uncaught() -> BaseException | None:
    """Return the exception that ends this program; None at an orderly exit or a prompt."""
    error = getattr(sys, "last_value", None)
    if sys.flags.interactive or hasattr(sys, "ps1"):
        return None
    # Others keep exceptions there too, as pytest does that of the last test that failed.
    trace = getattr(error, "__traceback__", None)
    return error if trace and trace.tb_frame.f_code.co_name in _PROGRAMS else None


def say_error(error: BaseException) -> None:
    """Say once in one line what ends this rank and where, unless other ranks have caused it."""
    if type(error) is not PeerError and not getattr(error, "_is_said", False):
        error._is_said = True  # type: ignore[attr-defined]
        text = " ".join(describe(error).split("\n", _MOST_LINES)[:_MOST_LINES])
        say(f"mpishare: rank {_rank()}: {place(error.__traceback__)}: {text}\n")


def say_exit(error: BaseException) -> None:
    """Say where a program leaves its node by `sys.exit`: Python prints nothing of that."""
    if is_failing_exit(error):
        say_error(error)


def place(trace: Any) -> str:
    """Return the innermost line of the user's program, or of any where none is the user's."""
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(trace)]
    theirs = (each for each in reversed(lines) if is_of_user(each[0]))
    file, line = next(theirs, lines[-1] if lines else ("no file", 0))
    return f"{file}, line {line}"


def _rank() -> int:
    from mpi4py import MPI

    return -1 if MPI.Is_finalized() else int(MPI.COMM_WORLD.rank)

"""Where a late rank is: others ask, and its watchdog answers with the line of its main thread.

The question is a time in the control block, the answer a text there. While no rank is late, this
costs nothing.
"""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from mpishare.coordination.control_block import State
from mpishare.coordination.poll import poll
from mpishare.errors import escaped

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from types import FrameType

    from mpishare.coordination.control_block import ControlBlock

# Whose code a file has, which is asked for the lines that are printed.
INSTALLED = "-packages/"  # ends the folder of installed packages
_OWN = f"{Path(__file__).parents[1]}/"
_COMPILED = (".pyx", ".pxi")  # of installed packages, which give a path that is none
_PYTHON = (f"{Path(os.__file__).parent}/", "<frozen ")

# Watchdogs look for questions every 0.1 s, and may wait for Python's lock.
ANSWER_S = 0.5

_SILENT = (
    "silent: stopped, or inside one call that holds Python's lock, as comm.allreduce and "
    "comm.reduce of mpi4py do"
)
_MAX_FILE, _MAX_NAME, _MAX_LINE = 60, 40, 60  # characters


def ask(
    block: ControlBlock,
    ranks: Collection[int],
    look: Callable[[], object],
    is_over: Callable[[], object] = bool,
) -> dict[int, str]:
    """Return where each of these ranks is. Host-blocking, `ANSWER_S` at most, or until `is_over`.

    `look` is called meanwhile: a thread that answers others does it there.
    """
    since_ns = block.ask()
    poll(lambda: len(answers(block, ranks, since_ns)) == len(ranks) or is_over(), ANSWER_S, look)
    return describe_all(block, ranks, since_ns)


def answers(block: ControlBlock, ranks: Iterable[int], since_ns: int) -> dict[int, str]:
    """Return where those of these ranks are that have answered since a time."""
    found = {rank: block.answer_of(rank, since_ns) for rank in ranks}
    return {rank: escaped(text) for rank, text in found.items() if text is not None}


def describe_all(block: ControlBlock, ranks: Collection[int], since_ns: int) -> dict[int, str]:
    """Return `answers`, and of the other ranks why there is none; words behind "is"."""
    found = answers(block, ranks, since_ns)
    return {rank: found.get(rank) or _why_silent(block, rank) for rank in ranks}


def answer(block: ControlBlock, thread: int) -> None:
    """Publish where a thread of this process is, if a rank has asked since the last answer."""
    if block.is_asked():
        block.answer(lambda: _place(block, thread))


def _why_silent(block: ControlBlock, rank: int) -> str:
    pid = block.pid(rank)
    if pid is None:
        return "not running any more"
    if block.state(rank) in (State.CLOSED, State.EXITED):  # its watchdog has ended
        return "at its end: it has closed the node, or its program is over"
    with suppress(OSError):
        # Behind the name in brackets: T where a signal has stopped it, t where a debugger has.
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1]
        if state in (b"T", b"t"):
            return f"stopped by a {'signal' if state == b'T' else 'debugger'} (process {pid})"
    return _SILENT


def _place(block: ControlBlock, thread: int) -> str:
    """Return the innermost line of the user's program in a thread, and the call made there.

    That is a call of mpishare, or a line of another package. Python's own library is passed over.
    """
    innermost = sys._current_frames().get(thread)
    stack = traceback.walk_stack(innermost) if innermost is not None else ()
    frames = [frame for frame, _ in stack if not is_of_python(frame.f_code.co_filename)]
    if not frames:
        return "in no line of Python"
    inner = [*takewhile(lambda frame: not is_of_user(frame.f_code.co_filename), frames)]
    # Without a line of the user's, as under `python -m`, the innermost one.
    mine = frames[len(inner)] if inner != frames else inner.pop(0)
    line = linecache.getline(mine.f_code.co_filename, mine.f_lineno).strip(" \t\n:")
    text = _name(mine) + (f": {_cut(line, _MAX_LINE)}" if line else "")
    if not inner:
        return text
    if not is_own(inner[0].f_code.co_filename):
        return f"{text} ({_name(inner[0])})"
    waits = block.status(block.rank)
    return f"{text} (in {inner[-1].f_code.co_qualname if waits is None else waits.call})"


def _name(frame: FrameType) -> str:
    """Return the file, the line and the function of a frame: of a long path the last parts."""
    code = frame.f_code
    path = code.co_filename.rpartition(INSTALLED)[2]
    if len(path) > _MAX_FILE:
        end = path[-_MAX_FILE:]
        path = f"...{end[max(end.find('/'), 0) :]}"
    return f"in {path}:{frame.f_lineno}, {_cut(code.co_qualname, _MAX_NAME)}"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def is_own(file: str) -> bool:
    return file.startswith(_OWN)


def is_of_python(file: str) -> bool:
    """Whether it is of Python's own library, whose folder may have those of all others in it."""
    return file.startswith(_PYTHON) and INSTALLED not in file and not is_own(file)


def is_of_user(file: str) -> bool:
    is_installed = INSTALLED in file or file.endswith(_COMPILED)
    return not (is_own(file) or is_of_python(file) or is_installed)

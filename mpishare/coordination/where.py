"""Late ranks: which are the cause of a wait, waits in a circle, and where these ranks are.

For that others ask, and the watchdog of a late rank answers with the line of its main thread. The
question is a time in the control block, the answer a text there. While no rank is late, this costs
nothing.
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
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from types import FrameType

    from mpishare.coordination.control_block import ControlBlock, Status

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

# Calls that wait for another call than their own, by the last word of their name.
_AWAITED = {
    "put": "A put waits until its consumers have taken earlier frames, or have closed the channel.",
    "get": "A get waits for the producer's next put, or its end().",
    "start": "A window's start waits for post on its targets: post first.",
    "wait": "A window's wait waits for complete on its origins, an event's for record.",
}

# A cycle of waits must stand still for this long before it is called a deadlock.
_STILL_NS = 500_000_000

# The time that a rank waiting elsewhere is given to publish why it leaves.
_REASON_S = 1.0


def root_causes(block: ControlBlock, awaited: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks at the end of the chains of waits that begin with `awaited`.

    An awaited rank may itself wait for another, or have left because another is missing: only that
    other one is a cause. Returns `awaited` where the chains end at ranks of other nodes, which have
    no number here.
    """
    found = set()
    path, seen = list(awaited), {block.rank}
    while path:
        rank = path.pop()
        if rank in seen:
            continue
        seen.add(rank)
        # The wait is read first: a rank that leaves publishes that before it ends its wait.
        status = block.status(rank)
        if status is not None and status.awaited:
            path.extend(status.awaited)
        elif (left := block.departure(rank)) and left.missing:
            path.extend(left.missing)
        else:
            found.add(rank)
    return tuple(sorted(found)) or tuple(awaited)


def awaited_calls(calls: Collection[str]) -> list[str]:
    """Return, for an error, what those of these calls wait for that are not collective."""
    words = {call.rpartition(": ")[2] for call in calls}
    return [text for word, text in _AWAITED.items() if word in words]


def left_meanwhile(block: ControlBlock, ranks: Sequence[int]) -> list[int]:
    """Return which of these ranks left by an error, whose text explains more than a timeout can.

    A rank that waits for another node began at about the time of this one, so it gets a moment.
    """

    def has_reason() -> bool:
        return all(each is None or each.awaited for each in map(block.status, ranks))

    poll(has_reason, _REASON_S)
    return [rank for rank in ranks if block.state(rank) == State.LEFT]


def find_cycle(block: ControlBlock, awaited: Sequence[int]) -> dict[int, Status]:
    """Return the ranks on the way from `awaited` back to this rank, with each one's wait.

    Empty where no chain of waits leads back.
    """
    seen: dict[int, Status] = {}
    path = list(awaited)
    is_closed = False
    while path:
        rank = path.pop()
        if rank == block.rank:
            is_closed = True
        elif rank not in seen:
            status = block.status(rank)
            if status is not None:
                seen[rank] = status
                path.extend(status.awaited)
    return seen if is_closed else {}


def stands_still(block: ControlBlock, cycle: Mapping[int, Status]) -> bool:
    """Whether each rank has looked in vain when all waits of a cycle had been there for a while.

    A rank that was merely stopped has not looked since then, and may go on with its next look.
    """
    waits = [*cycle.values(), *filter(None, [block.status(block.rank)])]
    since_ns = max(status.begun_ns for status in waits) + _STILL_NS
    return all(status.looked_ns > since_ns for status in waits)


# --- questions and answers


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
    """Return `answers`, and of the other ranks why there is none; words behind "is".

    Nothing of ranks that have left before they answered.
    """
    found = answers(block, ranks, since_ns)
    here = [rank for rank in ranks if rank in found or block.state(rank) != State.LEFT]
    return {rank: found.get(rank) or _why_silent(block, rank) for rank in here}


def answer(block: ControlBlock, thread: int) -> None:
    """Publish where a thread of this process is, if a rank has asked since the last answer.

    Not once this rank has left: its thread is where it heard of the reason.
    """
    if block.is_asked() and block.state(block.rank) == State.PRESENT:
        block.answer(lambda: place(block, thread))


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


def place(block: ControlBlock, thread: int) -> str:
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

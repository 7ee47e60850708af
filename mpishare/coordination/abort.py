"""What a process says before it aborts the job, so that somebody hears it."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import stat
import struct
import sys
import termios
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi4py import MPI

HEARD_S = 1.0
"""How long an abort waits for what all ranks have to say (a late one will say nothing), and for the
aborts of others."""


def say(text: str) -> None:
    """Write to stderr; where that is closed or its reader is gone, there is nobody to tell."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text)
        sys.stderr.flush()


def until(is_over: Callable[[], bool], most_s: float = HEARD_S) -> None:
    """Wait for that, though not for ever."""
    end = time.monotonic() + most_s
    while not is_over() and time.monotonic() < end:
        time.sleep(HEARD_S / 100)


def is_heard() -> bool:
    """Return whether somebody has read all that this process said."""
    return not any(map(_unread_nbytes, (1, 2)))


def abort_after(last_words: Callable[[], None]) -> None:
    """Abort the job after these, once they are read: an abort cuts off what is not. Local."""
    from mpi4py import MPI

    try:
        last_words()
        until(is_heard)
    finally:  # whatever signal comes meanwhile
        MPI.COMM_WORLD.Abort(1)


def _unread_nbytes(fd: int) -> int:
    """Return how much of what was written nobody has read, where that can be known."""
    try:
        kind = stat.S_IFMT(os.fstat(fd).st_mode)
    except OSError:
        return 0  # it is closed
    # For a pipe what is in it; for a socket what has not gone out.
    question = {stat.S_IFIFO: termios.FIONREAD, stat.S_IFSOCK: termios.TIOCOUTQ}.get(kind)
    if question is None:
        return 0
    return int(struct.unpack("i", fcntl.ioctl(fd, question, bytes(4)))[0])


_late: list[tuple[MPI.Request, str, int]] = []


def abort_unless_over(request: MPI.Request, why: str) -> None:
    """Abort the job at exit if a collective is not over by then: Finalize would hang in it. Local.

    For those that no node stands for, whose own end does that.
    """
    if not _late:
        atexit.register(_at_exit)
    _late.append((request, why, os.getpid()))


def _at_exit() -> None:
    from mpi4py import MPI

    request, why, pid = _late[0]
    if MPI.Is_finalized() or os.getpid() != pid or all(each.Test() for each, _, _ in _late):
        return

    def last_words() -> None:
        say(f"mpishare: rank {MPI.COMM_WORLD.rank} aborts the job: {why}\n")
        until(request.Test)  # the others say it too

    abort_after(last_words)

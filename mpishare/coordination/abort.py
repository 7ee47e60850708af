"""Aborting the job: a process says why, and somebody reads it, before everything is killed."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import stat
import struct
import sys
import termios
from typing import TYPE_CHECKING

from mpishare.coordination.poll import poll

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi4py import MPI

HEARD_S = 1.0
"""How long an abort waits until the output of all ranks is read, and for the aborts of others."""


def say(text: str) -> None:
    """Write to stderr; where it is closed or its reader is gone, that is all that can be done."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text)
        sys.stderr.flush()


def say_at_once(text: str) -> None:
    """Write to stderr in one piece, from any thread: `say` may wait for what others write."""
    if sys.__stderr__ is not None:
        with contextlib.suppress(OSError, ValueError):
            os.write(sys.__stderr__.fileno(), text.encode())


def wait_briefly(is_over: Callable[[], object], timeout_s: float = HEARD_S) -> bool:
    """Wait at the end of a process, without burning the core; return whether it came."""
    return poll(is_over, timeout_s, pause_s=HEARD_S / 100)


def is_output_read() -> bool:
    """Return whether somebody has read all output of this process."""
    return not any(map(_unread_nbytes, (1, 2)))


def abort_after(last_words: Callable[[], None]) -> None:
    """Abort the job, once this last output was read: an abort cuts off what was not."""
    from mpi4py import MPI

    try:
        last_words()
        wait_briefly(is_output_read)
    finally:  # whatever signal comes meanwhile
        MPI.COMM_WORLD.Abort(1)


def _unread_nbytes(fd: int) -> int:
    """Return how much of the output nobody has read, where that can be known."""
    try:
        kind = stat.S_IFMT(os.fstat(fd).st_mode)
    except OSError:
        return 0  # it is closed
    # For a pipe what is in it; for a socket what has not gone out.
    question = {stat.S_IFIFO: termios.FIONREAD, stat.S_IFSOCK: termios.TIOCOUTQ}.get(kind)
    if question is None:
        return 0
    return int(struct.unpack("i", fcntl.ioctl(fd, question, bytes(4)))[0])


_unfinished: list[tuple[MPI.Request, str, int]] = []


def abort_unless_over(request: MPI.Request, why: str) -> None:
    """Abort the job at exit if a collective is not over by then: Finalize would hang in it.

    For a collective before there is a node, whose own shutdown does that later.
    """
    if not _unfinished:
        atexit.register(_at_exit)
    _unfinished.append((request, why, os.getpid()))


def _at_exit() -> None:
    from mpi4py import MPI

    request, why, pid = _unfinished[0]
    if MPI.Is_finalized() or os.getpid() != pid or all(each.Test() for each, _, _ in _unfinished):
        return

    def last_words() -> None:
        say(f"mpishare: rank {MPI.COMM_WORLD.rank} aborts the job: {why}\n")
        wait_briefly(request.Test)  # the others say it too

    abort_after(last_words)

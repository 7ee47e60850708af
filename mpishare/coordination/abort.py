"""Aborting the job: a process says why, and somebody reads it, before everything is killed."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import select
import stat
import struct
import sys
import termios
import threading
from typing import TYPE_CHECKING

from mpishare.coordination.poll import poll
from mpishare.errors import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HEARD_S = 1.0
"""How long an abort waits until the output of all ranks is read, and for the aborts of others."""


def say(text: str) -> None:
    """Write to stderr; where it is closed or its reader is gone, that is all that can be done."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text)
        sys.stderr.flush()


def say_at_once(text: str) -> None:
    """Write to stderr in one piece, from any thread, unless its reader leaves no room for that.

    `say` may wait for what others write, and for a reader.
    """
    if sys.__stderr__ is not None:
        with contextlib.suppress(OSError, ValueError):
            fd, room = sys.__stderr__.fileno(), select.poll()
            room.register(fd, select.POLLOUT)
            if room.poll(0):  # for PIPE_BUF bytes, if it is a pipe
                os.write(fd, text.encode()[: select.PIPE_BUF])


def wait_briefly(is_over: Callable[[], object], timeout_s: float = HEARD_S) -> bool:
    """Wait at the end of a process, without burning the core; return whether it came."""
    return poll(is_over, timeout_s, pause_s=HEARD_S / 100)


def is_output_read() -> bool:
    """Return whether somebody has read all output of this process."""
    return not any(map(_unread_nbytes, (1, 2)))


def abort_after(last_words: Callable[[], None], is_averted: Callable[[], bool] = bool) -> None:
    """Abort the job, once this last output was read: an abort cuts off what was not.

    Not if the reason to abort has gone by then.
    """
    from mpi4py import MPI

    try:
        last_words()
        wait_briefly(is_output_read)
    finally:  # whatever signal comes meanwhile
        if not is_averted():
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


_reasons: list[tuple[str, Callable[[], object], int]] = []


def abort_at_exit(why: str, is_over: Callable[[], object] = bool) -> None:
    """Abort the job at exit, since Finalize would hang; not if all that it would wait for is over.

    For what fails before there is a node, whose own shutdown does that later.
    """
    if not _reasons:
        atexit.register(_at_exit)
    _reasons.append((why, is_over, os.getpid()))


def abort_when_left(call: str, error: BaseException) -> None:
    """Abort the job at exit: an exception of this rank alone left a call that others wait in."""
    abort_at_exit(f"{call} was left by an exception: {describe(error)}")


def _at_exit() -> None:
    from mpi4py import MPI

    why, is_over, pid = _reasons[0]
    if not MPI.Is_finalized() and os.getpid() == pid and not all(each() for _, each, _ in _reasons):
        _abort(why, is_over)


@contextlib.contextmanager
def abort_when_late(why: str, timeout_s: float) -> Iterator[None]:
    """Abort the job once the block takes longer: it makes an MPI call that has no deadline.

    From a thread, since the main one is inside that call.
    """
    over = threading.Event()

    def watch() -> None:
        # The second wait is for a process that was stopped: it may go on now.
        if not over.wait(timeout_s) and not over.wait(HEARD_S):
            _abort(why, over.is_set, over.is_set)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _abort(why: str, is_over: Callable[[], object], is_averted: Callable[[], bool] = bool) -> None:
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank

    def last_words() -> None:
        say(f"mpishare: rank {rank} aborts the job: {why}\n")
        # The others say it too. Then one after the other: where two abort at once, Open MPI's
        # launcher may never end.
        wait_briefly(is_over, HEARD_S * (1 + rank % 8 / 8))

    abort_after(last_words, is_averted)

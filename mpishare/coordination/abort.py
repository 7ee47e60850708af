"""The end of a program with a node: one line says why, and the job is aborted behind that.

The traceback is Python's own, of every rank. So the rank whose error it is repeats it at its end,
and an abort waits until the output was read.
"""

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
import traceback
from typing import TYPE_CHECKING, Any

from mpishare.coordination.poll import poll
from mpishare.coordination.where import is_of_user
from mpishare.errors import PeerError, describe, escaped
from mpishare.memory.mapped import remove_files_of_mpi

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# The time that an abort leaves for the output of all ranks to be read, and for other aborts.
HEARD_S = 1.0
# The time for output that the launcher has read: nothing tells where that is.
FORWARD_S = 0.2

_MOST_LINES = 3  # of the text of an error
# The outermost function of a program, and of one that `python -m` starts.
_PROGRAMS = ("<module>", "_run_module_as_main")


def say(text: str) -> None:
    """Write to stderr, and ignore a stderr that is closed or has no reader.

    Without control characters, which texts from other processes may have.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(escaped(text, "\n\t"))
        sys.stderr.flush()


def say_at_once(text: str) -> None:
    """Write to stderr in one piece, from any thread, unless the pipe is full.

    `say` may block on other writers and on the reader.
    """
    if sys.__stderr__ is not None:
        with contextlib.suppress(OSError, ValueError):
            fd, room = sys.__stderr__.fileno(), select.poll()
            room.register(fd, select.POLLOUT)
            if room.poll(0):  # for PIPE_BUF bytes, if it is a pipe
                os.write(fd, text.encode()[: select.PIPE_BUF])


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
    from mpi4py import MPI

    if type(error) is not PeerError and not getattr(error, "_is_said", False):
        error._is_said = True  # type: ignore[attr-defined]
        text = " ".join(describe(error).split("\n", _MOST_LINES)[:_MOST_LINES])
        rank = -1 if MPI.Is_finalized() else MPI.COMM_WORLD.rank
        say(f"mpishare: rank {rank}: {place(error.__traceback__)}: {text}\n")


def place(trace: Any) -> str:
    """Return the innermost line of the user's program, or of any where none is the user's."""
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(trace)]
    theirs = (each for each in reversed(lines) if is_of_user(each[0]))
    file, line = next(theirs, lines[-1] if lines else ("no file", 0))
    return f"{file}, line {line}"


def wait_briefly(is_over: Callable[[], object], timeout_s: float = HEARD_S) -> bool:
    """Wait at the end of a process, without burning the core; return whether the event came."""
    return poll(is_over, timeout_s, pause_s=HEARD_S / 100)


def is_output_read() -> bool:
    return not any(map(_unread_nbytes, (1, 2)))


def abort(
    why: object, wait: Callable[[], object] = bool, is_averted: Callable[[], bool] = bool
) -> None:
    """Print why this rank aborts the job, wait for the others, and abort once all output was read.

    Without a reason nothing is printed: the output has it. An abort cuts off unread output. Does
    nothing if the reason to abort has gone by then.
    """
    from mpi4py import MPI

    try:
        remove_files_of_mpi()
        if why:  # not the rank in a node: a job may have several
            say(f"mpishare: rank {MPI.COMM_WORLD.rank} aborts the job: {why}\n")
        wait()
        wait_briefly(is_output_read)
        # What the launcher has read is on its way to the terminal: srun drops that at an abort.
        wait_briefly(bool, FORWARD_S)
    finally:  # whatever signal comes meanwhile
        if not is_averted():
            MPI.COMM_WORLD.Abort(1)


def _unread_nbytes(fd: int) -> int:
    """Return the number of unread bytes of output, 0 where it cannot be known."""
    try:
        kind = stat.S_IFMT(os.fstat(fd).st_mode)
    except OSError:
        return 0  # it is closed
    # Bytes in a pipe; bytes of a socket that have not gone out.
    question = {stat.S_IFIFO: termios.FIONREAD, stat.S_IFSOCK: termios.TIOCOUTQ}.get(kind)
    if question is None:
        return 0
    return int(struct.unpack("i", fcntl.ioctl(fd, question, bytes(4)))[0])


class AtEnd:
    """Calls a function once: with True at `MPI.Finalize`, or with False at exit before that."""

    def __init__(self, end: Callable[[bool], object]) -> None:
        from mpi4py import MPI

        self._mpi: Any = MPI
        self._end = end
        self._pid = os.getpid()
        # MPI calls this first of all in Finalize, while its calls still work (MPI 4.1, 11.2.4).
        self._keyval = MPI.Comm.Create_keyval(delete_fn=lambda *_: self._at_finalize())
        MPI.COMM_SELF.Set_attr(self._keyval, True)
        atexit.register(self._at_exit)

    def cancel(self) -> None:
        atexit.unregister(self._at_exit)
        if self._keyval != self._mpi.KEYVAL_INVALID and not self._mpi.Is_finalized():
            keyval, self._keyval = self._keyval, self._mpi.KEYVAL_INVALID
            self._mpi.COMM_SELF.Delete_attr(keyval)
            self._mpi.Comm.Free_keyval(keyval)

    def _at_finalize(self) -> None:
        if self._keyval != self._mpi.KEYVAL_INVALID:
            self._keyval = self._mpi.KEYVAL_INVALID
            self._end(True)

    def _at_exit(self) -> None:
        # A forked child must not act for its parent.
        if not self._mpi.Is_finalized() and os.getpid() == self._pid:
            self.cancel()
            remove_files_of_mpi()  # `mpi4py` may abort the job behind this
            self._end(False)


def abort_at_exit(why: str, is_over: Callable[[], object] = bool) -> None:
    """Abort the job at exit, since Finalize would hang, unless all that it would wait for is over.

    For failures before there is a node, whose own shutdown does this later.
    """
    AtEnd(lambda _: None if is_over() else _abort(why, is_over))


def abort_when_left(call: str, error: BaseException) -> None:
    """Abort the job at exit: this rank alone raised an exception in a collective call."""
    abort_at_exit(f"{call} was left by an exception: {describe(error)}")


@contextlib.contextmanager
def abort_when_late(why: Callable[[], object], timeout_s: float) -> Iterator[None]:
    """Abort the job if the block, an MPI call without a deadline, takes longer than the timeout.

    From a thread, since the main thread is inside that call.
    """
    over = threading.Event()

    def watch() -> None:
        # The second wait gives a process that was stopped the time to go on.
        if not over.wait(timeout_s) and not over.wait(HEARD_S):
            _abort(why(), over.is_set, over.is_set)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _abort(
    why: object, is_over: Callable[[], object], is_averted: Callable[[], bool] = bool
) -> None:
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    # The others write theirs. Then one after the other: where two abort at once, Open MPI's
    # launcher may never end.
    turn_s = HEARD_S * (1 + rank % 8 / 8)
    abort(why, lambda: wait_briefly(is_over, turn_s), is_averted)

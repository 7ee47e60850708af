"""The end of a program with a node: one line says why, and the job is aborted behind that.

A node that was not closed ends at exit, or at `MPI.Finalize` (`Shutdown`).

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

from mpishare.coordination.control_block import Mark, State
from mpishare.coordination.life import Event
from mpishare.coordination.poll import poll
from mpishare.coordination.waits import of_this_thread
from mpishare.coordination.where import is_of_user
from mpishare.errors import ClosedError, PeerError, describe, escaped, name_ranks
from mpishare.memory.mapped import remove_files_of_mpi

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mpishare.coordination.agreement import Agreement

# The time that an abort leaves for the output of all ranks to be read, and for other aborts.
HEARD_S = 1.0
# The time for output that the launcher has read: nothing tells where that is.
FORWARD_S = 0.2
# After an uncaught exception, the time that the other ranks have to say that they heard of it.
UNCAUGHT_S = 2.0
TURN_S = 0.5

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


# --- a node that was not closed


class Shutdown:
    """Ends one node with the process or with MPI, whichever comes first.

    Calls `finish` before this rank publishes its end, with whether that is an orderly one; and
    `stop`, of the watchdog, before its memory is unmapped.
    """

    def __init__(
        self, agreement: Agreement, finish: Callable[[bool], None], stop: Callable[[], None]
    ) -> None:
        self._agreement, self._life = agreement, agreement.life
        self._finish, self._stop = finish, stop
        # Forgets a node that all its ranks have closed.
        self.cancel = AtEnd(self._end).cancel

    def _depart(self) -> None:
        agreement, block = self._agreement, self._agreement.block
        error = uncaught()
        if error is not None:
            say_error(error)
            wait_briefly(is_output_read)  # the reason, before others repeat it
        self._finish(error is None)
        if error is not None:
            # All nodes before the wait for the others of one: they may wait in another one.
            for node in (agreement, *of_this_thread()):
                if node.life.failure is None:
                    node.life.leave("the program", error)
        if self._life.failure is None:
            block.depart(State.EXITED)
            return
        self._life.tell(self._life.failure)  # so that this rank is not taken for the cause
        if error is None:
            self._abort_if_unheard()
        else:
            self._abort_uncaught()

    def _end(self, in_finalize: bool) -> None:
        """Publish the end of this rank, and stop what uses the memory of the node."""
        agreement, failure = self._agreement, self._life.failure
        is_heard = failure is None or self._life.is_fatal or self._life.is_raised
        if failure is not None and not is_heard and not in_finalize:
            # No call raised it: the data of this rank may be wrong, and nothing else would report
            # that.
            say(f"mpishare: rank {agreement.rank}: {failure}\n")
        self._abort_if_fatal()
        self._depart()
        self._stop()
        if self._life.failure is not None:
            self._life.release(has_streams=False)  # it may not have seen the last reason
            for wait in self._life.at_exit:
                wait()
        if in_finalize:
            text = "MPI was finalized while the node was open"
            self._life.end(Event.FINALIZE, ClosedError(text))

    def _abort_if_fatal(self) -> None:
        """Abort the job where a rank is missing: Finalize would hang in pending messages."""
        if self._life.failure is not None and self._life.is_fatal:
            abort(self._life.failure, self._let_others_abort)

    def _let_others_abort(self, limit_s: float = HEARD_S) -> None:
        """Let the others print why the job ends, too. Then abort one after the other.

        Where two do at once, Open MPI's launcher may never end.
        """
        agreement, block = self._agreement, self._agreement.block

        def are_all_out() -> bool:
            agreement.progress()
            return not self._writing() and is_output_read()

        def is_aborting(rank: int) -> bool:
            return block.has_mark(Mark.ABORTING, rank) and block.is_running(rank)

        if self._life.failure is not None:
            self._life.tell(self._life.failure)
        block.mark(Mark.ABORTING)
        wait_briefly(are_all_out, limit_s)
        wait_briefly(lambda: not any(map(is_aborting, range(agreement.rank))), TURN_S)

    def _writing(self) -> list[int]:
        """Return the other ranks that may still write output."""
        block = self._agreement.block
        return [r for r in self._agreement.others if not block.is_past(Mark.ABORTING, r)]

    def _abort_if_unheard(self) -> None:
        """Abort the job where this rank has left and others go on: Finalize would wait for them.

        They learn of it by their next call to mpishare. A rank that waits in plain MPI for this one
        makes no such call.
        """
        agreement = self._agreement
        timeout_s = UNCAUGHT_S - HEARD_S if self._life.is_exiting else agreement.timeout_s

        def unaware() -> list[int]:
            agreement.progress()
            return [*filter(agreement.block.is_here, agreement.others)]

        wait_briefly(lambda: not unaware())
        if late := unaware():
            text = f"has left the node, and waits for {name_ranks(late)} to notice"
            say(f"mpishare: rank {agreement.rank} {text}\n")
            wait_briefly(lambda: not unaware(), timeout_s)
        if late := unaware():
            why = f"{name_ranks(late)} made no call to mpishare within {timeout_s:g} s"
            abort(f"it has left the node, and {why}")

    def _abort_uncaught(self) -> None:
        """Abort the job of a program that an exception has ended, wherever the other ranks are."""
        self._let_others_abort(UNCAUGHT_S)
        if late := self._writing():
            more = f"{name_ranks(late)} did not end within {UNCAUGHT_S:g} s"
            abort(f"an exception has ended it, and {more}")
        abort("")

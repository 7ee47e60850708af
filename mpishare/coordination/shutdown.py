"""Shutdown of a node that was not closed: at exit, at `MPI.Finalize`, and after a death."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpishare.coordination.abort import (
    HEARD_S,
    AtEnd,
    abort,
    is_output_read,
    say,
    say_error,
    uncaught,
    wait_briefly,
)
from mpishare.coordination.control_block import Mark, State
from mpishare.coordination.life import Event
from mpishare.coordination.waits import of_this_thread
from mpishare.errors import ClosedError, name_ranks
from mpishare.memory.shared import remove_abandoned

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.coordination.agreement import Agreement
    from mpishare.coordination.watchdog import Watchdog

# After an uncaught exception, the time that the other ranks have to say that they heard of it.
UNCAUGHT_S = 2.0
TURN_S = 0.5


class Shutdown:
    """Ends one node with the process or with MPI, whichever comes first.

    Stops the watchdog before its memory is unmapped; calls `finish` before this rank publishes its
    end, with whether that is an orderly one.
    """

    def __init__(
        self,
        agreement: Agreement,
        watchdog: Watchdog,
        finish: Callable[[bool], None],
    ) -> None:
        self._agreement, self._life = agreement, agreement.life
        self._watcher = watchdog
        self._finish = finish
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
        self._watcher.stop()
        if self._life.failure is not None:
            self._life.release(has_streams=False)  # it may not have seen the last reason
            for wait in self._life.at_exit:
                wait()
        if in_finalize:
            text = "MPI was finalized while the node was open"
            self._life.end(Event.FINALIZE, ClosedError(text))

    def _abort_if_fatal(self) -> None:
        """Abort the job where a rank is missing: Finalize would hang in pending messages."""
        failure = self._life.failure
        if failure is not None and self._life.is_fatal:
            try:
                wait_briefly(lambda: not remove_abandoned())
            finally:
                abort(failure, self._let_others_abort)

    def _let_others_abort(self) -> None:
        """Let the others print why the job ends, too."""
        if self._life.failure is not None:
            self._life.tell(self._life.failure)
        self._agreement.block.mark(Mark.ABORTING)
        wait_briefly(lambda: not self._writing() and is_output_read())
        self._wait_for_turn()

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

        def late() -> list[int]:
            self._agreement.progress()
            return self._writing()

        wait_briefly(is_output_read)
        self._agreement.block.mark(Mark.ABORTING)
        wait_briefly(lambda: not late(), UNCAUGHT_S)
        if went_on := late():
            more = f"{name_ranks(went_on)} did not end within {UNCAUGHT_S:g} s"
            abort(f"an exception has ended it, and {more}", self._wait_for_turn)
        abort("", self._wait_for_turn)

    def _wait_for_turn(self) -> None:
        """Abort one after the other: where two do at once, Open MPI's launcher may never end."""
        agreement, block = self._agreement, self._agreement.block

        def is_aborting(rank: int) -> bool:
            return block.has_mark(Mark.ABORTING, rank) and block.is_running(rank)

        wait_briefly(lambda: not any(map(is_aborting, range(agreement.rank))), TURN_S)

"""Shutdown of a node that was not closed: at exit, at `MPI.Finalize`, and after a death."""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING, Any

from mpishare.coordination.abort import abort_after, is_output_read, say, wait_briefly
from mpishare.coordination.control_block import State
from mpishare.coordination.uncaught import uncaught
from mpishare.coordination.waits import of_this_thread
from mpishare.errors import ClosedError, PeerError, name_ranks
from mpishare.memory.shared import remove_abandoned

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.coordination.agreement import Agreement
    from mpishare.coordination.watchdog import Watchdog
    from mpishare.errors import MpiShareError


class Shutdown:
    """Ends one node with the process or with MPI, whichever comes first.

    Stops the watchdog before its memory is unmapped; calls `finish` before this rank publishes its
    end, with whether that is an orderly one. `has_other_nodes`: the node is one of several that
    were made together.
    """

    def __init__(
        self,
        agreement: Agreement,
        watchdog: Watchdog,
        finish: Callable[[bool], None],
        *,
        has_other_nodes: bool,
    ) -> None:
        from mpi4py import MPI

        self._has_other_nodes = has_other_nodes
        self._agreement = agreement
        self._watcher = watchdog
        self._finish = finish
        self._pid = os.getpid()
        self._mpi: Any = MPI
        # MPI calls this first of all in Finalize, while its calls still work (MPI 4.1, 11.2.4).
        self._keyval = MPI.Comm.Create_keyval(delete_fn=lambda *_: self._at_finalize())
        MPI.COMM_SELF.Set_attr(self._keyval, True)
        atexit.register(self._at_exit)

    def cancel(self) -> None:
        """Unregister the node, which all its ranks have closed."""
        atexit.unregister(self._at_exit)
        self._forget_finalize()

    def _forget_finalize(self) -> None:
        if self._keyval != self._mpi.KEYVAL_INVALID and not self._mpi.Is_finalized():
            keyval, self._keyval = self._keyval, self._mpi.KEYVAL_INVALID
            self._mpi.COMM_SELF.Delete_attr(keyval)
            self._mpi.Comm.Free_keyval(keyval)

    def _depart(self) -> None:
        self._agreement.block.mark_ending()
        error = uncaught()
        self._finish(error is None)
        if error is not None:
            # All nodes before the wait for the others of one: they may wait in another one.
            for node in (self._agreement, *of_this_thread()):
                if node.failure is None:
                    node.leave("the program", error)
        failure = self._agreement.failure
        if failure is None:
            self._agreement.block.depart(State.EXITED)
        else:
            self._agreement.tell(failure())  # so that this rank is not taken for the cause
            self._abort_if_unheard()
            if error is not None:
                self._let_others_speak(error)
                if self._has_other_nodes and not self._agreement.is_fatal:
                    self._abort_for_other_nodes()

    def _at_finalize(self) -> None:
        if self._keyval == self._mpi.KEYVAL_INVALID:
            return
        self._keyval = self._mpi.KEYVAL_INVALID
        self._end()
        self._agreement.fail(
            lambda: ClosedError("MPI was finalized while the node was open"), fatal=False
        )

    def _at_exit(self) -> None:
        agreement = self._agreement
        if self._mpi.Is_finalized() or os.getpid() != self._pid:
            return  # a forked child must not act for its parent
        failure = agreement.failure
        if failure is not None and not agreement.is_fatal and not agreement.is_raised:
            # No call raised it: the data of this rank may be wrong, and nothing else would report
            # that.
            say(f"mpishare: rank {agreement.rank}: {failure()}\n")
        self._end()

    def _end(self) -> None:
        """Publish the end of this rank, and stop what uses the memory of the node."""
        self._abort_if_fatal()
        self._forget_finalize()
        self._depart()
        self._watcher.stop()
        self._agreement.block.barrier.close()

    def _abort_if_fatal(self) -> None:
        """Abort the job where a rank is missing: Finalize would hang in pending messages."""
        failure = self._agreement.failure
        if failure is not None and self._agreement.is_fatal:
            try:
                # Clean up names too that an exiting rank still locks: it holds its files until its
                # end.
                block, others = self._agreement.block, self._agreement.others
                ending = [rank for rank in others if block.is_being_killed(rank)]
                wait_briefly(lambda: not any(map(block.is_running, ending)))
                remove_abandoned()
            finally:
                abort_after(lambda: self._say_in_turn(failure()))

    def _abort_if_unheard(self) -> None:
        """Abort the job where this rank has left and others go on: Finalize would wait for them.

        They learn of it by their next call to mpishare. A rank that waits in plain MPI for this one
        makes no such call.
        """
        agreement, block = self._agreement, self._agreement.block

        def unaware() -> list[int]:
            agreement.progress()
            return [rank for rank in agreement.others if block.is_here(rank)]

        mine, timeout_s = f"mpishare: rank {agreement.rank}", agreement.timeout_s
        wait_briefly(lambda: not unaware())
        if late := unaware():
            say(f"{mine} has left the node, and waits for {name_ranks(late)} to notice\n")
            wait_briefly(lambda: not unaware(), timeout_s)
        if late := unaware():
            why = f"{name_ranks(late)} made no call to mpishare within {timeout_s:g} s"
            abort_after(lambda: say(f"{mine} aborts the job: it has left the node, and {why}\n"))

    def _let_others_speak(self, error: BaseException) -> None:
        """Wait for the others' output where `mpi4py` may abort the job for an error that they
        caused.
        """
        block = self._agreement.block
        wait_briefly(is_output_read)
        block.mark_aborting()
        if type(error) is PeerError:
            wait_briefly(lambda: all(map(block.is_silent, self._agreement.others)))

    def _abort_for_other_nodes(self) -> None:
        """Abort the job after an exception: ranks on other nodes would wait for this one."""
        agreement = self._agreement
        text = "an exception ended this rank, and ranks on other nodes would wait for it"

        def last_words() -> None:
            say(f"mpishare: rank {self._mpi.COMM_WORLD.rank} aborts the job: {text}\n")
            self._wait_for_turn()

        agreement.block.mark_aborting()
        abort_after(last_words)

    def _say_in_turn(self, failure: MpiShareError) -> None:
        """Print why the job ends, and let the others do so too."""
        agreement, block = self._agreement, self._agreement.block
        say(f"mpishare: rank {agreement.rank} aborts the job: {failure}\n")
        agreement.tell(failure)
        block.mark_aborting()
        wait_briefly(lambda: all(map(block.is_silent, agreement.others)) and is_output_read())
        self._wait_for_turn()

    def _wait_for_turn(self) -> None:
        """Abort one after the other: where two do at once, Open MPI's launcher may never end."""
        agreement, block = self._agreement, self._agreement.block
        before = [rank for rank in agreement.others if rank < agreement.rank]
        wait_briefly(lambda: not any(block.is_aborting(rank) for rank in before))

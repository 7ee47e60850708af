"""Waits of the host for other ranks: they end, by arrival, by a reason or by the deadline."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from threading import get_ident
from typing import TYPE_CHECKING, TypeVar

from mpishare.coordination.control_block import ControlBlock, State, Status
from mpishare.coordination.deadlock import find_cycle, given_up, root_causes
from mpishare.errors import (
    ClosedError,
    MismatchError,
    MpiShareError,
    PeerError,
    PeerTimeout,
    UnsupportedError,
    describe,
    describe_stragglers,
    peer_error,
    ranks_in_words,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Lost = TypeVar("Lost", bound=MpiShareError)

log = logging.getLogger("mpishare")

STRAGGLER_S = 30.0
"""A rank that is waited for this long is named in a warning."""

_EXITED = "exited without closing the node"

SAY_S = 0.05
"""A wait that is shorter is not worth a word to the others."""

_CYCLE_S = 0.5
"""How long a cycle of waits must stand still before it is called one."""


class Waits:
    """How one rank waits for the others of its node, and whether the node is whole.

    Parameters
    ----------
    block : ControlBlock
        Where the ranks of the node speak.
    timeout_s : float, seconds
        After this a wait of the host for another rank raises `PeerTimeout`.
    """

    def __init__(self, block: ControlBlock, timeout_s: float) -> None:
        self.block = block
        self.rank = block.rank
        self.size = block.size
        self.others = tuple(rank for rank in range(block.size) if rank != block.rank)
        self.timeout_s = timeout_s
        self.progress: Callable[[], object] = int
        """Called while this rank waits: what it has sent by MPI may not arrive without."""
        self.failure: Callable[[], MpiShareError] | None = None
        """Makes the error that every later call raises; None while the node is whole."""
        self.is_fatal = False
        """A rank died or timed out: MPI itself cannot be brought to an orderly end."""
        self.is_told = False
        """The main thread has raised the failure at least once."""
        self.thread = get_ident()
        self._lock = threading.Lock()  # the watchdog breaks the node too
        _all.add(self)

    # --- whether this node can still be used

    def check(self) -> None:
        """Raise if the node is closed or broken, or if this is another thread or process."""
        if self.failure is not None or get_ident() != self.thread:
            self._refuse()

    def fail(self, failure: Callable[[], MpiShareError], *, fatal: bool) -> None:
        """Mark the node broken; the first reason stands. Called by the watchdog's thread too."""
        with self._lock:
            if self.failure is None:
                self.is_fatal = fatal
                self.failure = failure

    def leave(self, call: str, error: BaseException) -> None:
        """Leave the node by an exception: tell the others, and let nobody use it here. Local."""
        said = describe(error)
        self.tell(error)
        self.fail(
            lambda: ClosedError(f"the node was left by an exception in {call}: {said}"),
            fatal=False,
        )
        self.is_told = True

    def tell(self, error: BaseException) -> None:
        """Tell the others that this rank leaves and why; the first word said stands. Local."""
        # Ranks of another node have other numbers: only who is missing on this one counts.
        own = None if self.failure is None else self.failure()
        missing = own.ranks if isinstance(own, PeerTimeout) else ()
        is_cause = type(error) is not PeerError
        self.block.depart(State.LEFT, describe(error), missing, is_cause=is_cause)

    def _refuse(self) -> None:
        if self.failure is not None:
            self.is_told = True
            raise self.failure()
        raise UnsupportedError(
            "an object of mpishare was used in another thread than the one that made it. Order "
            "between ranks is order between calls: make them all in one thread."
        )

    # --- host waits

    def wait(self, call: str, pending: Callable[[], list[int]], timeout_s: float = 0.0) -> None:
        """Wait on the host until nobody lags, a pending rank has gone, or the deadline.

        Parameters
        ----------
        call : str
            In which call this rank waits, for the others to read.
        pending : callable
            Returns the ranks that are waited for; none ends the wait.
        timeout_s : float, seconds
            Default: the node's.
        """
        spins = 0
        while pending():
            spins += 1
            # Give the core away at once: with more ranks than cores the rank that is waited for
            # may need this very core, and a spin would hold it for a whole time slice.
            os.sched_yield()
            if spins == 200:
                self._wait_long(call, pending, timeout_s or self.timeout_s)
                return

    def _wait_long(self, call: str, pending: Callable[[], list[int]], timeout_s: float) -> None:
        watch = WaitMonitor(self, call)
        try:
            while pending():
                os.sched_yield()
                self.progress()
                self._check_peers(call, pending)
                if watch.since_s() > timeout_s and (awaited := pending()):
                    raise self.timed_out(call, awaited, timeout_s)
                watch.look(pending)
        finally:
            watch.end()

    def _check_peers(self, call: str, pending: Callable[[], list[int]]) -> None:
        if self.failure is not None:
            self._refuse()
        state = self.block.state
        gone = [rank for rank in self.others if state(rank) != State.PRESENT]
        if gone:
            # Asked again, since a rank may do what is waited for and leave just after.
            missed = [rank for rank in pending() if rank in gone]
            if missed:
                self.fail_without(call, missed)
                self._refuse()

    def fail_without(self, call: str, gone: Sequence[int]) -> None:
        """Break the node since ranks have left. The watchdog calls it too.

        Who left because another rank is missing is not to blame: then that one is missing here too.
        """
        causes: dict[int, str] = {}
        followers: dict[int, str] = {}
        missing: set[int] = set()
        # All that left, since the one with the cause left before those that pass it on.
        left = [rank for rank in self.others if self.block.state(rank) == State.LEFT]
        for rank in sorted({*gone, *left}):
            state = self.block.state(rank)
            if state == State.LEFT:
                text, without, is_cause = self.block.departure(rank)
                missing.update(without)
                (causes if is_cause else followers)[rank] = text
            else:
                is_closed = state == State.CLOSED
                causes[rank] = "closed the node" if is_closed else _EXITED
        missing.discard(self.rank)
        if not causes:
            exited = [rank for rank in self.others if self.block.state(rank) == State.EXITED]
            causes = dict.fromkeys(exited, _EXITED)
        said = causes or followers
        if missing:
            words_said, timeout_s = str(peer_error(call, said)), self.timeout_s
            self.fail(
                lambda: PeerTimeout(words_said, ranks=missing, timeout_s=timeout_s), fatal=True
            )
        else:
            self.fail(lambda: peer_error(call, said), fatal=False)

    def timed_out(self, call: str, awaited: Sequence[int], timeout_s: float) -> MpiShareError:
        """Break the node since ranks are missing, tell the others, and return the error."""
        ranks = root_causes(self.block, awaited)
        if gone := given_up(self.block, ranks):
            self.fail_without(call, gone)
        if self.failure is not None:
            self.is_told = True
            return self.failure()
        text = (
            f"{call} failed: {ranks_in_words(ranks)} did not arrive within {timeout_s:g} s "
            f"(rank {self.rank} of {self.size}). The node cannot be used any more."
        )
        return self.lose(
            lambda: PeerTimeout(text, ranks=ranks, timeout_s=timeout_s), fatal=True, missing=ranks
        )

    def deadlock(self, call: str, cycle: dict[int, Status]) -> MismatchError:
        """Break the node since ranks wait for each other, tell the others, return the error."""
        failures = {rank: f"waits in {status.call}" for rank, status in sorted(cycle.items())}
        text = (
            f"ranks wait for each other: rank {self.rank} in {call}, "
            + ", ".join(f"rank {rank} in {status.call}" for rank, status in sorted(cycle.items()))
            + ". Calls that meet each other are made in the same order on all ranks of a node."
        )
        return self.lose(lambda: MismatchError(text, failures=failures), fatal=False)

    def lose(
        self, failure: Callable[[], Lost], *, fatal: bool, missing: Sequence[int] = ()
    ) -> Lost:
        """Break the node, tell the others that this rank leaves and for want of whom, return why.

        Local.
        """
        error = failure()
        self.fail(failure, fatal=fatal)
        self.is_told = True
        self.block.depart(State.LEFT, describe(error), missing)
        return error


class WaitMonitor:
    """What a rank does while it waits: it says for whom, warns of the late, and sees circles.

    Parameters
    ----------
    waits : Waits
        Of the node.
    call : str
        In which call this rank waits.
    """

    def __init__(self, waits: Waits, call: str) -> None:
        self._waits = waits
        self._call = call
        self._start = self._cycle_since = time.monotonic()
        self._is_late = False
        self._published: list[int] | None = None
        self._cycle: dict[int, Status] = {}

    def since_s(self) -> float:
        """How long it has waited."""
        return time.monotonic() - self._start

    def look(self, pending: Callable[[], list[int]]) -> None:
        """Look once more.

        Parameters
        ----------
        pending : callable
            Returns the ranks of the node that are waited for. Asked after the clock: this process
            may have been stopped since it asked last, and all may have come meanwhile.

        Raises
        ------
        MismatchError
            If ranks wait for each other.
        """
        waits, now = self._waits, time.monotonic()
        if now - self._start < SAY_S:
            return
        awaited = pending()
        if awaited and now - self._start > STRAGGLER_S and not self._is_late:
            self._is_late = True
            log.warning(
                "%s", describe_stragglers(self._call, awaited, now - self._start, waits.rank)
            )
        if self._published != awaited:
            waits.block.begin_wait(self._call, awaited)
            self._published = awaited
        waits.block.look()
        if now - self._cycle_since > _CYCLE_S:
            self._cycle_since = now
            seen = find_cycle(waits.block, awaited)
            if seen and _stands_still(self._cycle, seen):
                raise waits.deadlock(self._call, seen)
            self._cycle = seen

    def end(self) -> None:
        """Say that this rank goes on."""
        if self._published is not None:
            self._waits.block.end_wait()


def _stands_still(before: dict[int, Status], now: dict[int, Status]) -> bool:
    # Each rank is in the same wait and has looked again since: what it waits for is really not
    # there. A rank that was merely stopped has not looked, and may find it when it goes on.
    return before.keys() == now.keys() and all(
        now[rank].version == status.version and now[rank].looks > status.looks + 1
        for rank, status in before.items()
    )


_all: weakref.WeakSet[Waits] = weakref.WeakSet()


def _after_fork() -> None:
    for waits in _all:
        waits.failure = lambda: UnsupportedError(
            "an object of mpishare was used in a forked process. MPI and CUDA do not survive a "
            "fork: start processes with the `spawn` method, or use the object in its own process."
        )


os.register_at_fork(after_in_child=_after_fork)

"""Waits of the host for other ranks: they end by arrival, by an error or by the deadline."""

from __future__ import annotations

import logging
import os
import sys
import time
import weakref
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any, Self

from mpishare.coordination.control_block import ControlBlock, Mark, State, Status
from mpishare.coordination.life import Event, NodeLife
from mpishare.coordination.poll import comes_at_once, poll
from mpishare.coordination.where import (
    answer,
    ask,
    awaited_calls,
    find_cycle,
    left_meanwhile,
    root_causes,
    stands_still,
)
from mpishare.errors import (
    EpochError,
    MismatchError,
    MpiShareError,
    UnsupportedError,
    describe_stragglers,
    late_ranks,
    name_places,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

log = logging.getLogger("mpishare")

# A longer wait is published in the control block, for the others to see.
PUBLISH_S = 0.05

NO_THREAD = 0  # no identifier of a thread

# The ranks look for a cycle of waits as often as this.
_CYCLE_S = 0.5


class Waits:
    """Waits of one rank for the others of its node, and the failure of the node.

    After `timeout_s` seconds a wait of the host for another rank raises `PeerTimeout`.
    """

    def __init__(self, block: ControlBlock, timeout_s: float) -> None:
        self.block = block
        self.rank, self.size = block.rank, block.size
        self.others = tuple(rank for rank in range(block.size) if rank != block.rank)
        self.timeout_s = timeout_s
        self.here = f"rank {self.rank} of {self.size}"  # for errors
        # The ranks of the node, from when it is made until it is closed.
        self.ranks: dict[int, int] = {}
        # A name that only they know, and what nodes within this one take over: `Findings`.
        self.name = ""
        self.findings: Any = None
        # The ranks of its plans, by those in their order: `PlanComm`.
        self.plan_comms: dict[Any, Any] = {}
        # For plans without a given node: the backend of their fields, and the node.
        self.kept: tuple[str, Any] | None = None
        # Called while this rank waits: MPI may not deliver this rank's messages without it.
        self.progress: Callable[[], object] = int
        self.life = NodeLife(block, timeout_s)
        # What fails if a rank leaves now, for the watchdog to name.
        self.subject = "the node"
        # Whose calls these are, and who may make one now: no thread amid a call.
        self.owner = self.thread = get_ident()
        _all[id(self)] = self

    # --- state of the node

    def check(self) -> None:
        """Raise if the node is closed or broken, amid a call, or in another thread or process."""
        if self.life.failure is not None or get_ident() != self.thread:
            self._refuse()

    def check_whole(self) -> None:
        """Raise if the node is closed or broken: amid a call."""
        if self.life.failure is not None:
            self._refuse()

    def in_any_thread(
        self, call: Callable[..., object], begin: Callable[[], object]
    ) -> Callable[..., None]:
        """Return a call that any thread may make behind `begin`, and the node's own not meanwhile.

        A context manager around the call would take as long as a small exchange.
        """

        def run(*arguments: Any, **options: Any) -> None:
            before = self.owner
            self.owner = self.thread = get_ident()
            try:
                begin()
                call(*arguments, **options)
            finally:
                self.owner = self.thread = before

        return run

    def blocked(self, call: str) -> Blocked:
        """Return the block of a wait, or of a call."""
        return Blocked(self, call)

    @contextmanager
    def waiting_in(self, call: str) -> Iterator[None]:
        """Within the block a rank that leaves makes this call fail."""
        outer, self.subject = self.subject, call
        try:
            yield
        finally:
            self.subject = outer

    def _refuse(self) -> None:
        if self.life.failure is not None:
            raise self.life.raised(self.life.failure)
        if self.thread == NO_THREAD and get_ident() == self.owner:
            raise EpochError(
                "a handler of a signal called mpishare amid a call of the same node. Let it set a "
                "flag, and make the call after that."
            )
        why = (
            "an object of mpishare was used in another thread than the one that made it. Order "
            "between ranks is order between calls: make them all in one thread."
        )
        if "torch" in sys.modules:
            why += (
                " In a backward pass of PyTorch, which has a thread for each GPU: with "
                "torch.autograd.set_multithreading_enabled(False)."
            )
        raise UnsupportedError(why)

    # --- host waits

    def wait(self, call: str, pending: Callable[[], list[int]]) -> None:
        """Wait on the host until no rank is pending, a pending one has gone, or the deadline.

        `call` is published as this rank's wait.
        """

        def check() -> None:
            self.progress()
            self._check_departed(call, pending)

        with self.blocked(call):
            if comes_at_once(lambda: not pending()):
                return
            with self.waiting_in(call), WaitMonitor(self, call, pending, check) as monitor:
                if not monitor.poll(lambda: not pending()) and (ranks := pending()):
                    raise self.timed_out(call, ranks)

    def require_all_here(self, call: str) -> None:
        """Raise if a rank has left or died, with the reason."""
        if gone := [rank for rank in self.others if not self.block.is_here(rank)]:
            self.wait(call, lambda: gone)

    def _check_departed(self, call: str, pending: Callable[[], list[int]]) -> None:
        # Checked again, since a rank may signal and leave, or die, just after. Where counters are
        # released, their values are no signals.
        if self.life.failure is not None and (self.block.has_any(Mark.BROKEN) or pending()):
            self._refuse()
        if not self.block.are_all_present():
            gone = {r for r in self.others if self.block.state(r) != State.PRESENT}
            if missed := sorted(gone.intersection(pending())):
                self.life.fail_departed(call, missed)
                self._refuse()

    def timed_out(self, call: str, awaited: Sequence[int]) -> MpiShareError:
        """Break the node since ranks are missing, publish it, and return the error."""
        return self.life.raised(self.fail_late(call, awaited))

    def fail_late(self, call: str, awaited: Sequence[int]) -> MpiShareError:
        """Break the node since ranks are missing; the watchdog's thread calls it too."""
        ranks = root_causes(self.block, awaited)
        if gone := left_meanwhile(self.block, ranks):
            self.life.fail_departed(call, gone)
        if self.life.failure is not None:
            return self.life.failure
        error = late_ranks(call, ranks, self.timeout_s, self.here, self.where(ranks))
        return self.life.end(Event.DEADLINE, error)

    def where(self, ranks: Collection[int], is_over: Callable[[], object] = bool) -> dict[int, str]:
        """Return where late ranks are. Host-blocking, half a second at most, or until `is_over`.

        In the watchdog's thread it answers others meanwhile, which may ask in theirs.
        """
        if get_ident() == self.owner:
            return ask(self.block, ranks, self.progress, is_over)
        return ask(self.block, ranks, lambda: answer(self.block, self.owner), is_over)

    def deadlock(self, call: str, cycle: dict[int, Status]) -> MismatchError:
        """Break the node since ranks wait for each other, publish it, and return the error."""
        calls = {rank: cycle[rank].call for rank in sorted(cycle)}
        failures = {rank: f"waits in {name}" for rank, name in calls.items()}
        called = {self.rank: call, **calls}
        named = ", ".join(f"rank {rank} in {name}" for rank, name in called.items())
        rule = (
            "Collective calls must be made in the same order on all ranks of a node. A call that "
            "raised on a rank alone was not made there."
        )
        why = f"ranks wait for each other: {named}{name_places(self.where(calls))}. {rule}"
        text = " ".join([why, *awaited_calls({*called.values()})])
        return self.life.end_by(Event.DISORDER, MismatchError(text, failures=failures))


class Blocked:
    """Within this block, a wait or a call, what handlers of signals call is refused.

    An exception that one of them raises ends the node: the other ranks do not know of it. Not a
    generator, which takes three times as long: there are several in the making of a plan.
    """

    def __init__(self, waits: Waits, call: str) -> None:
        self._waits, self._call = waits, call

    def __enter__(self) -> None:
        self._before, self._waits.thread = self._waits.thread, NO_THREAD

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            self._waits.life.leave(self._call, error)
        self._waits.thread = self._before


class WaitMonitor:
    """Watches one long wait: publishes it, warns of stragglers, finds deadlocks.

    `check` is called at each look, and may raise. `moves`: the wait is for messages of MPI, which
    move on while it tests them. So it does not sleep; and ranks that wait for each other in one
    call may do so until large messages are across.
    """

    def __init__(
        self,
        waits: Waits,
        call: str,
        pending: Callable[[], list[int]],
        check: Callable[[], object] = int,
        *,
        moves: bool = False,
    ) -> None:
        self._waits = waits
        self._moves = moves
        self._call = call
        self._pending = pending
        self._check = check
        self._look_at = time.monotonic() + PUBLISH_S
        self._cycle_at = time.monotonic() + _CYCLE_S
        self._published: list[int] | None = None

    def poll(self, is_done: Callable[[], object]) -> bool:
        """Wait with the deadline of the node; return whether it came."""
        with self._waits.blocked(self._call):
            limit_s, sleeps = self._waits.timeout_s, not self._moves
            return poll(is_done, limit_s, self.look, warn=self.warn, sleeps=sleeps)

    def look(self) -> None:
        """Check once more; raise `MismatchError` if ranks wait for each other."""
        self._check()
        waits, now = self._waits, time.monotonic()
        # Seldom: what is pending may be read out of the waits of all ranks, by all ranks.
        if now < self._look_at:
            return
        self._look_at = now + PUBLISH_S
        # Read after the clock: this process may have been stopped, and all may have come.
        awaited = self._pending()
        self._publish(awaited, int(1e9 * now))
        if now > self._cycle_at:
            self._cycle_at = now + _CYCLE_S
            cycle = find_cycle(waits.block, awaited)
            is_one_call = self._moves and all(each.call == self._call for each in cycle.values())
            if cycle and not is_one_call and stands_still(waits.block, cycle):
                raise waits.deadlock(self._call, cycle)

    def _publish(self, awaited: list[int], now_ns: int) -> None:
        """Publish for which ranks this one waits, and that it looked at this time."""
        if self._published != awaited:
            self._published = awaited  # first: an exception may come before all is out
            self._waits.block.begin_wait(self._call, awaited)
        self._waits.block.look(now_ns)

    def warn(self, waited_s: float) -> None:
        """Name the stragglers in a warning; for `poll`."""
        where = self._waits.where(self._pending(), lambda: not self._pending())
        if awaited := self._pending():
            where = {rank: text for rank, text in where.items() if rank in awaited}
            text = describe_stragglers(self._call, awaited, waited_s, self._waits.rank, where)
            log.warning("%s", text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._published is not None:
            self._waits.block.end_wait()


# By their ids. Other threads make and drop nodes while this one looks at them: a dictionary is
# copied at once, and a set is not.
_all: weakref.WeakValueDictionary[int, Waits] = weakref.WeakValueDictionary()


def _of_all_threads() -> list[Waits]:
    return [each for ref in _all.valuerefs() if (each := ref()) is not None]


def of_this_thread() -> list[Waits]:
    """Return the open nodes whose calls are made in this thread, broken ones too."""
    thread = get_ident()
    return [each for each in _of_all_threads() if each.ranks and each.owner == thread]


def _after_fork() -> None:
    for waits in _of_all_threads():
        why = (
            "an object of mpishare was used in a forked process. MPI and CUDA do not survive a "
            "fork: start processes with the `spawn` method, or use the object in its own process."
        )
        waits.life.end(Event.FORK, UnsupportedError(why))


os.register_at_fork(after_in_child=_after_fork)

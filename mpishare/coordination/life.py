"""The life of a node at one rank: what each event makes of it. A node is whole, or it is over.

Errors of arguments that are found before anything is published, and failures inside an agreed step,
leave a node whole. Every other exception, departure or death ends it for all its ranks.
"""

from __future__ import annotations

import time
from copy import copy
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from mpishare.coordination.control_block import Departure, Mark, State
from mpishare.coordination.where import ANSWER_S, answers
from mpishare.errors import (
    ClosedError,
    MpiShareError,
    PeerError,
    PeerTimeout,
    departure_error,
    describe,
    is_failing_exit,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from mpishare.coordination.control_block import ControlBlock

Failure = TypeVar("Failure", bound=MpiShareError)

_ENDED = {State.CLOSED: "closed the node", State.EXITED: "exited without closing the node"}


class Life(Enum):
    """The state of a node at one rank; the value says what a call gets."""

    WHOLE = "does its work"
    OVER = "raises the reason again"
    CLOSED = "raises `ClosedError`"


class Event(Enum):
    """An event in the life of a node; the value describes it."""

    REFUSAL = "an argument is refused, or the work of an agreed step raises an `Exception`"
    EXCEPTION = "any other exception in a call or a `with` block, as `KeyboardInterrupt` anywhere"
    DEPARTURE = "another rank has left the node"
    ABSENCE = "another rank has left it because a rank is missing"
    DISORDER = "ranks wait for each other, or have made calls that do not fit"
    DEADLINE = "a rank did not arrive within `timeout_s`"
    DEATH = "the process of another rank has ended"
    CLOSE = "all ranks have called `close()`"
    FINALIZE = "MPI is finalized"
    FORK = "this process is a fork of the rank"


class Action(NamedTuple):
    """The state behind an event, and what this rank does.

    Where a node is over, its streams are released, and this rank publishes that it has left, with
    the reason, when a call raises that.
    """

    life: Life
    is_raised: bool = False
    """The exception goes up by itself: this rank has published it, and owes no other report."""
    is_fatal: bool = False
    """A rank is missing: MPI could not be finalized, so this process aborts the job at its end."""


_OVER = Action(Life.OVER)
_MISSING = Action(Life.OVER, is_fatal=True)

# An event that finds the node over or closed changes nothing: the first reason stands.
LIFE: dict[tuple[Life, Event], Action] = {
    (Life.WHOLE, Event.REFUSAL): Action(Life.WHOLE),
    (Life.WHOLE, Event.EXCEPTION): Action(Life.OVER, is_raised=True),
    (Life.WHOLE, Event.DEPARTURE): _OVER,
    (Life.WHOLE, Event.ABSENCE): _MISSING,
    (Life.WHOLE, Event.DISORDER): _OVER,
    (Life.WHOLE, Event.DEADLINE): _MISSING,
    (Life.WHOLE, Event.DEATH): _MISSING,
    (Life.WHOLE, Event.CLOSE): Action(Life.CLOSED),
    (Life.WHOLE, Event.FINALIZE): Action(Life.CLOSED),
    (Life.WHOLE, Event.FORK): _OVER,
    **{(life, event): Action(life) for life in (Life.OVER, Life.CLOSED) for event in Event},
}


class NodeLife:
    """The life of a node at one rank, and the one way to its end, whoever sees the reason.

    `end` keeps the first reason, which every later call raises; `tell` publishes that this rank has
    left; `release`, in the watchdog's thread, ends the waits of streams.
    """

    def __init__(self, block: ControlBlock, timeout_s: float) -> None:
        self._block = block
        self._others = [rank for rank in range(block.size) if rank != block.rank]
        self._timeout_s = timeout_s
        # Every later call raises a copy of this error; None while the node is whole.
        self.failure: MpiShareError | None = None
        # As in `Action`; both stay false while the node is whole.
        self.is_fatal = self.is_raised = False
        # Left by `sys.exit` of a failure: this process ends, and will not be back.
        self.is_exiting = False
        # Called once, by `release`: they end waits of streams for words of others' libraries.
        self.at_end: list[Callable[[], object]] = []
        # Called behind these where the process ends: they wait until those waits have ended.
        self.at_exit: set[Callable[[], object]] = set()
        # The first is that which stands: the watchdog's thread ends the node too.
        self._ends: list[tuple[Event, MpiShareError]] = []

    @property
    def state(self) -> Life:
        """The state of the node at this rank."""
        return LIFE[Life.WHOLE, self._ends[0][0]].life if self._ends else Life.WHOLE

    def end(self, event: Event, failure: MpiShareError) -> MpiShareError:
        """Do what `LIFE` has for an event that ends the node; return the first reason.

        The watchdog's thread calls it too.
        """
        if self.state is Life.WHOLE:
            self._ends.append((event, failure))  # copies are raised: this one holds no frames
        first, reason = self._ends[0]
        self.is_fatal = LIFE[Life.WHOLE, first].is_fatal
        self.is_raised |= LIFE[Life.WHOLE, event].is_raised
        self.failure = reason
        return reason

    def end_by(self, event: Event, failure: Failure) -> Failure:
        """End the node, publish the reason and the missing ranks; return the error to raise."""
        self.end(event, failure)
        return self.raised(failure)

    def leave(self, call: str, error: BaseException) -> None:
        """End the node by an exception of this rank, and publish that, unless it is published."""
        self.is_exiting = is_failing_exit(error)
        if not self.is_raised:
            self.tell(error)
            text = f"the node was left by an exception in {call}: {describe(error)}"
            self.end(Event.EXCEPTION, ClosedError(text))

    def raised(self, failure: Failure) -> Failure:
        """Return a copy for the main thread, once it is published that this rank leaves by it.

        From then on the program may overwrite cells that a slow neighbor still reads in place.
        """
        self.is_raised = True
        self.tell(failure)
        return copy(failure)

    def tell(self, error: BaseException) -> None:
        """Publish that this rank leaves and why; the first reason stands."""
        # Ranks of another node have other numbers: only missing ranks of this one count.
        missing = self.failure.ranks if isinstance(self.failure, PeerTimeout) else ()
        departure = Departure(describe(error), missing, type(error) is not PeerError)
        self._block.depart(State.LEFT, departure)

    def release(self, *, has_streams: bool) -> None:
        """End what streams wait for, once the node is over. Repeated by the watchdog's thread."""
        if has_streams:
            # Published first, and repeated: a stream of this or another rank may still write.
            self._block.mark(Mark.BROKEN)
            self._block.pool.release_all()
        while self.at_end:
            self.at_end.pop()()

    def fail_departed(self, call: str, gone: Sequence[int]) -> None:
        """End the node since ranks have left; the watchdog's thread calls it too.

        A rank that left because another one is missing is not the cause: then that one is missing
        here too.
        """
        # All that left, since the cause left before those that pass it on.
        block = self._block
        left = block.departures()
        left.pop(block.rank, None)
        reasons = self._causes(gone, left) or {rank: each.text for rank, each in left.items()}
        missing = {rank for each in left.values() for rank in each.missing} - {block.rank}
        # Answers to the ranks that missed them, if those asked just now.
        where = answers(block, missing, time.monotonic_ns() - int(2e9 * ANSWER_S))
        failure = departure_error(call, reasons, missing, self._timeout_s, where)
        self.end(Event.ABSENCE if missing else Event.DEPARTURE, failure)

    def _causes(self, gone: Sequence[int], left: Mapping[int, Departure]) -> dict[int, str]:
        """Return the reasons of ranks that are gone, but for those that followed another one."""
        causes = {rank: each.text for rank, each in left.items() if each.is_cause}
        # Who closed the node in order may have caught the error that one of these made.
        ends = (State.EXITED,) if causes else (State.CLOSED, State.EXITED)
        causes |= self._ended({*gone} - {*left}, *ends)
        return dict(sorted(causes.items())) or self._ended(self._others, State.EXITED)

    def _ended(self, ranks: Collection[int], *ends: State) -> dict[int, str]:
        """Return how those of these ranks ended that are in one of these states."""
        states = {rank: self._block.state(rank) for rank in ranks}
        return {rank: _ENDED[state] for rank, state in states.items() if state in ends}

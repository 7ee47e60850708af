"""The life of a node at one rank: what each event makes of it. A node is whole, or it is over.

Errors of arguments that are found before anything is published, and failures inside an agreed step,
leave a node whole. Every other exception, departure or death ends it for all its ranks.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Life(Enum):
    """The state of a node at one rank; the value says what a call gets."""

    WHOLE = "does its work"
    OVER = "raises the reason again"
    CLOSED = "raises `ClosedError`"


class Event(Enum):
    """An event in the life of a node; the value describes it."""

    REFUSAL = "an argument is refused, or the work of an agreed step fails on some rank"
    EXCEPTION = (
        "any other exception in a call or a `with` block of this rank, also of a signal amid it"
    )
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

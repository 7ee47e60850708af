"""The capture into a graph that is under way, and the calls that its graph repeats."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol, Self

from mpishare.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.coordination.waits import Waits

_thread = threading.local()

# Captures of all threads: fast paths are not taken while there is any.
UNDER_WAY: list[Recording] = []


class NoLoopError(UnsupportedError):
    """A call that cannot be in a loop of a graph."""


class Replayable(Protocol):
    """An engine whose calls may be captured, and are repeated by every replay."""

    @property
    def name(self) -> str: ...  # of the plan, for errors
    @property
    def agreement(self) -> Waits: ...  # of its node
    @property
    def chains(self) -> Sequence[Any]: ...  # that a call follows: a replay does, too
    @property
    def calls(self) -> Any: ...  # one word: how many this rank has made; none once it is closed
    @property
    def nccl(self) -> Any: ...  # its `NcclRanks`, or None
    @property
    def abort(self) -> int: ...  # device address of a word that is not 0 once the node is broken


class Recording:
    """The calls captured within a `with` block of this thread.

    In a loop (`is_loop`) the graph repeats them by itself, which some operations do not allow.
    Where the capture fails, the callables in `undo` are called: the captured calls will never run.
    """

    def __init__(self, name: str, *, is_loop: bool) -> None:
        self.name = name
        self.is_loop = is_loop
        self.undo: list[Callable[[], None]] = []
        self._before: dict[Replayable, int] = {}

    def add(self, engine: Replayable) -> None:
        """Note that an engine is about to be called."""
        self._before.setdefault(engine, engine.calls[0])

    @property
    def engines(self) -> list[Replayable]:
        return list(self._before)

    def events(self) -> set[int]:
        """Return those by which NCCL orders graphs."""
        found = {engine.nccl for engine in self._before} - {None}
        return {event for ranks in found for event in ranks.events()}

    def take_calls(self) -> list[tuple[Replayable, int]]:
        """Return the engines and the number of calls of each, and uncount these calls."""
        found = []
        for engine, before in self._before.items():
            found.append((engine, engine.calls[0] - before))
            engine.calls[0] = before
        return found

    def fail(self) -> None:
        self.take_calls()
        for undo in self.undo:
            undo()

    def __enter__(self) -> Self:
        """Begin; captures do not nest."""
        _thread.recording = self
        UNDER_WAY.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _thread.recording = None
        UNDER_WAY.remove(self)


def current() -> Recording | None:
    """Return the capture of this thread, or None."""
    return getattr(_thread, "recording", None)


def require_none(call: str, why: str) -> None:
    """Raise `UnsupportedError` if this thread captures: a replay would not repeat this call."""
    recording = current()
    if recording is not None:
        raise UnsupportedError(
            f"{call} failed inside {recording.name}: {why}. Call it outside of the captured "
            "function."
        )

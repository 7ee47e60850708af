"""The capture into a graph that is under way, and the calls that its graph will make again."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol, Self

from mpishare.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.coordination.waits import Waits

_thread = threading.local()

UNDER_WAY: list[Recording] = []
"""Those of all threads, for fast paths, which take the long way while there is any."""


class NoLoopError(UnsupportedError):
    """What is being captured cannot be in a loop of a graph."""


class Replayable(Protocol):
    """An engine whose calls may be captured, and are then made again by every replay."""

    @property
    def name(self) -> str:
        """The plan's, for errors."""
        ...

    @property
    def is_closed(self) -> bool:
        """Whether the memory that its launches use is gone."""
        ...

    @property
    def agreement(self) -> Waits:
        """That of its node."""
        ...

    @property
    def chains(self) -> Sequence[Any]:
        """The stream chains that a call follows: a replay does, too."""
        ...

    @property
    def calls(self) -> Any:
        """One word: how many exchanges this rank has called."""
        ...

    @property
    def abort(self) -> int:
        """Device address of a word that is not 0 once the node is broken."""
        ...


class Recording:
    """What is captured within a `with` block of this thread. Local.

    Parameters
    ----------
    name : str
        What is being captured, for errors.
    is_loop : bool
        Whether the graph repeats it by itself, which some operations cannot be in.

    Attributes
    ----------
    undo : list of callable
        Called where the capture fails: what was captured so far will never run.
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
        """The engines that were called."""
        return list(self._before)

    def take_calls(self) -> list[tuple[Replayable, int]]:
        """Return the engines and how often each was called; none of the calls counts as made."""
        found = []
        for engine, before in self._before.items():
            found.append((engine, engine.calls[0] - before))
            engine.calls[0] = before
        return found

    def fail(self) -> None:
        """Take back what the calls have left behind."""
        self.take_calls()
        for undo in self.undo:
            undo()

    def __enter__(self) -> Self:
        """Begin; captures do not nest."""
        _thread.recording = self
        UNDER_WAY.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        _thread.recording = None
        UNDER_WAY.remove(self)


def current() -> Recording | None:
    """Return what this thread captures now, or None. Local."""
    return getattr(_thread, "recording", None)


def require_none(call: str, why: str) -> None:
    """Raise `UnsupportedError` if this thread captures: a replay would not make this call."""
    recording = current()
    if recording is not None:
        raise UnsupportedError(
            f"{call} failed inside {recording.name}: {why}. Call it outside of the captured "
            "function."
        )

"""What the two backends have in common: the words that the rest of mpishare says to either."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from mpishare.memory.shared import SharedMemory


@dataclass(frozen=True)
class Device:
    """The GPU of a rank.

    Attributes
    ----------
    ordinal : int
        Its number in this process; another process may call the same GPU by another number.
    uuid : str
        Its name everywhere, e.g. ``GPU-1f3c...``.
    pci_id : str
        Where it sits, e.g. ``0000:18:00.0``.
    name : str
        Its model.
    mps : bool
        Whether processes share it through the Multi-Process Service.
    """

    ordinal: int
    uuid: str
    pci_id: str
    name: str
    mps: bool


class Memory(Protocol):
    """An allocation as one rank holds it: its own, or a mapping of another rank's."""

    nbytes: int
    address: int
    """Where this process sees it."""

    @property
    def is_held(self) -> bool:
        """Whether arrays of it are alive."""
        ...

    def array(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return the first bytes as an array; it keeps the mapping alive."""
        ...

    def close(self) -> bool:
        """Unmap or free; False, and nothing done, where arrays of it forbid that."""
        ...


class Backend(Protocol):
    """Memory, streams and order on one kind of machine. All methods are local."""

    name: str
    has_streams: bool

    @property
    def xp(self) -> ModuleType:
        """The array library."""
        ...

    @property
    def device(self) -> Device | None:
        """The GPU of this rank."""
        ...

    def allocate(self, nbytes: int) -> Memory:
        """Allocate memory to share."""
        ...

    def publish(self, memory: Memory) -> str:
        """Return the token by which others `open` memory that this rank allocated."""
        ...

    def open(self, token: str, nbytes: int, uuid: str) -> Memory:
        """Map what another rank allocated."""
        ...

    def settle(self, token: str) -> None:
        """Take the token back, once every rank has opened it or failed to."""
        ...

    def register(self, memory: SharedMemory) -> int:
        """Let the GPU see host memory; return its address there, 0 without a GPU."""
        ...

    def unregister(self, memory: SharedMemory) -> None:
        """Undo `register`."""
        ...

    def stream(self, stream: Any) -> tuple[int, Any]:
        """Return the number of a stream given in any accepted form, and what keeps it alive."""
        ...

    def enter(self, stream: Any, name: str, call: str) -> tuple[int, Any, bool]:
        """As `stream`, for a call on a named object, and whether the stream is sure to live.

        Raises `UnsupportedError` if the stream is being captured.
        """
        ...

    def is_current(self, stream: int) -> bool:
        """Whether a call without a stream goes to this one, and may."""
        ...

    def local_event(self) -> Any:
        """Make an event for this process alone."""
        ...

    def signals(self, operations: Sequence[tuple[str, int]]) -> Signals:
        """Prepare operations on counters: ``("write" | "wait", address)``, in this order."""
        ...

    def events(self, count: int) -> tuple[list[Any], list[str]]:
        """Make events to share; return them with their tokens."""
        ...

    def open_events(self, tokens: Sequence[str]) -> list[Any]:
        """Open another rank's events."""
        ...

    def close_events(self, events: Sequence[Any]) -> None:
        """Destroy events."""
        ...

    def record(self, event: Any, stream: int) -> None:
        """Record an event on a stream."""
        ...

    def wait_event(self, event: Any, stream: int) -> None:
        """Let a stream wait for the latest record of an event."""
        ...

    def is_capturing(self, stream: int) -> bool:
        """Whether the stream is being captured into a graph."""
        ...

    def is_event_done(self, event: Any) -> bool:
        """Whether what an event recorded last is over."""
        ...

    def is_done(self, stream: int) -> bool:
        """Whether all that was put on the stream is over."""
        ...

    def drain(self, timeout_s: float) -> bool:
        """Wait for all streams of this process; False where that takes longer."""
        ...


class Signals(Protocol):
    """Prepared counter operations, put on a stream as one batch."""

    def enqueue(self, stream: int, values: Sequence[int]) -> None:
        """Put them on a stream with these values, in the order in which they were given."""
        ...

"""The backend interface: memory, streams and events of one kind of machine.

To add a backend: derive from `Backend`; implement ``allocate``, ``publish``, ``open`` and
``retract``, and a `Memory`; with streams, override everything below them as well; let
`mpishare.setup` choose it.
"""
# ruff: noqa: ARG002, B027  defaults ignore their arguments, and some do nothing

from __future__ import annotations

from abc import ABC, abstractmethod
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
        Its number in this process; another process may number the same GPU differently.
    uuid : str
        Its name in all processes, e.g. ``GPU-1f3c...``.
    pci_id : str
        Its PCI address, e.g. ``0000:18:00.0``.
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
    """Where it is mapped in this process."""

    @property
    def is_held(self) -> bool:
        """Whether arrays on it are alive."""
        ...

    def array(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return the first bytes as an array, which keeps the mapping alive."""
        ...

    def close(self) -> bool:
        """Unmap or free; return False, with nothing done, where live arrays forbid that."""
        ...


StreamInfo = tuple[int, Any, bool, bool]
"""The stream of a call: its handle; what keeps it alive; whether that is certain until the next
call; whether it is being captured into a graph. A plain tuple, as calls make one each time."""


class Signals(Protocol):
    """Prepared counter operations, enqueued as one batch."""

    def enqueue(self, stream: int, values: Sequence[int]) -> None:
        """Enqueue them with these values, in the order in which they were given."""
        ...


class Backend(ABC):
    """Memory, streams and events on one kind of machine. All methods are local.

    The defaults are those of a backend without streams, whose calls block.

    Attributes
    ----------
    name : str
        As in ``Node.backend``.
    has_streams : bool
        Whether calls are ordered on streams.
    xp : module
        The array library.
    device : Device or None
        The GPU of this rank.
    """

    name: str
    has_streams = False
    xp: ModuleType
    device: Device | None = None

    @abstractmethod
    def allocate(self, nbytes: int) -> Memory:
        """Allocate memory that can be shared."""

    @abstractmethod
    def publish(self, memory: Memory) -> str:
        """Return the token with which other ranks `open` memory of this rank."""

    @abstractmethod
    def open(self, token: str, nbytes: int, uuid: str) -> Memory:
        """Map memory that another rank published."""

    @abstractmethod
    def retract(self, token: str) -> None:
        """Take a token back, once every rank has opened it or failed to."""

    def descriptor(self, token: str) -> int | None:
        """Return a descriptor, to be read alone, of published memory that is a file; else None."""
        return None

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy from address to address, of a GPU or of registered host memory."""
        raise NotImplementedError(f"the {self.name} backend has no streams")

    def make_current(self) -> None:
        """Make this rank's GPU the current one of the calling thread."""

    def register(self, memory: SharedMemory) -> int:
        """Make host memory accessible to the GPU; return its device address, 0 without a GPU."""
        return 0

    def unregister(self, memory: SharedMemory) -> None:
        """Undo `register`."""

    def stream(self, stream: Any) -> tuple[int, Any]:
        """Return the handle of a stream given in any accepted form, and what keeps it alive."""
        return 0, None

    def enter(self, stream: Any) -> StreamInfo:
        """Return the stream of a call, given in any accepted form; None: the current one."""
        return 0, None, True, False

    def new_stream(self) -> Any:
        """Create a stream of the highest priority, which waits for no default stream."""
        raise NotImplementedError(f"the {self.name} backend has no streams")

    def close_stream(self, stream: Any) -> None:
        """Destroy a stream of `new_stream`."""

    def is_current(self, stream: int) -> bool:
        """Whether a call without ``stream=`` would be enqueued on this stream now."""
        return True

    def is_capturing(self, stream: int) -> bool:
        """Whether the stream is being captured into a graph."""
        return False

    def is_done(self, stream: int) -> bool:
        """Whether everything enqueued on the stream is done."""
        return True

    def drain(self, timeout_s: float) -> bool:
        """Wait for all streams of this process; return False on a timeout."""
        return True

    def signals(self, operations: Sequence[tuple[str, int]]) -> Signals:
        """Prepare counter operations, ``("write" | "wait", address)``, to be enqueued in order."""
        raise NotImplementedError(f"the {self.name} backend has no streams")

    def local_event(self) -> Any:
        """Create an event for this process alone."""
        return None

    def events(self, count: int) -> tuple[list[Any], list[str]]:
        """Create events that other ranks can open; return them with their tokens."""
        return [None] * count, [""] * count

    def open_events(self, tokens: Sequence[str]) -> list[Any]:
        """Open events of another rank."""
        return [None] * len(tokens)

    def close_events(self, events: Sequence[Any]) -> None:
        """Destroy events."""

    def record(self, event: Any, stream: int) -> None:
        """Record an event on a stream."""

    def wait_event(self, event: Any, stream: int) -> None:
        """Let a stream wait for the latest record of an event."""

    def is_event_done(self, event: Any) -> bool:
        """Whether the latest record of an event is done; True if it was never recorded."""
        return True

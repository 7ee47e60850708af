"""The backend interface: memory, streams and events of one kind of machine."""
# ruff: noqa: ARG002, B027  defaults ignore their arguments, and some do nothing

from __future__ import annotations

import reprlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from mpishare.errors import HandleError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from mpishare.memory.fd_server import FdServer
    from mpishare.memory.handle import Handle
    from mpishare.memory.kinds import Kind, Refusal
    from mpishare.memory.memory import ArrayLayout, Memory
    from mpishare.memory.shared import SharedMemory
    from mpishare.memory.types import BackendName


@dataclass(frozen=True)
class Device:
    """The GPU of a rank."""

    ordinal: int  # in this process; another one may number the same GPU differently
    uuid: str  # in all processes: ``GPU-1f3c...``
    pci_id: str  # ``0000:18:00.0``
    name: str  # of the model
    mps: bool  # shared by processes through the Multi-Process Service
    compute_capability: str  # ``9.0``
    driver: str  # ``580.159 (CUDA 13.0)``; ``CUDA 13.0`` where the kernel has no version of it


class Exported(NamedTuple):
    """Memory that exists already, in a form for other ranks."""

    memory: Memory  # of the array alone, not of its allocation
    kind: Kind
    token: str  # of the allocation
    offset: int  # of the memory in the allocation, bytes
    capacity: int  # of the allocation, bytes
    retract: Callable[[], None] = lambda: None  # once every rank has tried to open; repeatable
    doubt: Refusal | None = None  # where it depends on the other ranks whether they can open it


class InPlace(ABC):
    """Sharing of memory that exists already: exported to other ranks, and mapped there. Local."""

    def is_alive(self, address: int) -> bool:
        """Whether there is memory at the address of an array."""
        return True

    @abstractmethod
    def export(
        self, source: Any, address: int, nbytes: int, *, is_host: bool
    ) -> Exported | Refusal:
        """Return memory for others to map, or why not; `source` is held until it is closed."""

    def open(self, handle: Handle, rank: int) -> Memory:
        """Map memory that another rank exported."""
        raise HandleError(f"a handle of kind {handle.kind!r} was received, which is unknown here")


class PoolMemory(Protocol):
    """The memory of a pool as one rank holds it. Blocks are named by their address there."""

    def array(self, address: int, nbytes: int, layout: ArrayLayout) -> tuple[Any, Any]:
        """Return an array in a block, and an object that lives as long as it and its views."""
        ...

    def close(self) -> None:
        """Free or unmap all of it, once no rank holds a block."""
        ...


class OwnMemory(PoolMemory, Protocol):
    """The memory of a pool on its owner."""

    def export(self) -> int:
        """Return a file descriptor for `Backend.import_pool`, which the caller closes."""
        ...

    def allocate(self, nbytes: int, stream: int) -> int:
        """Return a block, ordered on a stream."""
        ...

    def free(self, blocks: Sequence[tuple[int, int, int]]) -> None:
        """Free blocks (address, nbytes, stream) that no other rank holds, ordered on streams."""
        ...

    def publish(self, address: int) -> bytes:
        """Return the token with which other ranks `open` a block."""
        ...

    def find(self, array: Any) -> tuple[int, int] | None:
        """Return the block of an array, and the array's offset in it; None if it is in none."""
        ...


class PeerMemory(PoolMemory, Protocol):
    """The memory of another rank's pool."""

    def open(self, token: bytes, nbytes: int) -> int:
        """Return a block, mapped; HandleError if it would not be in the pool."""
        ...

    def let_go(self, address: int) -> None:
        """Undo one `open`, once no work that uses the block is left."""
        ...


def handle_of(stream: Any) -> int:
    """Return the handle of a stream: CuPy's, PyTorch's, any `__cuda_stream__`, or an int.

    Else raise `TypeError`. The host backend, without streams, checks its arguments all the same: so
    a wrong one does not first fail on a GPU.
    """
    if isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        return stream
    for name in ("ptr", "cuda_stream"):
        handle = getattr(stream, name, None)
        if isinstance(handle, int):
            return handle
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is None:
        raise TypeError(
            f"stream must be None, an int >= 0, or an object with .ptr, .cuda_stream or "
            f"__cuda_stream__, not {reprlib.repr(stream)}"
        )
    return int((protocol() if callable(protocol) else protocol)[1])


StreamInfo = tuple[int, Any, bool, bool]
"""The stream of a call: its handle; its owner; whether that certainly keeps it alive until the next
call; whether it is being captured into a graph. A plain tuple, as calls make one each time."""


class Signals(Protocol):
    """Prepared counter operations, enqueued as one batch."""

    def enqueue(self, stream: int, values: Sequence[int]) -> None:
        """Enqueue the operations with these values, in their order."""
        ...


class Backend(ABC):
    """Memory, streams and events on one kind of machine. All methods are local.

    The defaults are those of a backend without streams, whose calls block.
    """

    name: BackendName
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

    @abstractmethod
    def in_place(self, fd_server: FdServer, timeout_s: float) -> InPlace:
        """Return how memory that exists already is shared; the timeout is for each descriptor."""

    @abstractmethod
    def create_pool(self, max_nbytes: int) -> OwnMemory:
        """Make the memory of a pool; size 0 is all that the machine has."""

    @abstractmethod
    def import_pool(self, fd: int) -> PeerMemory:
        """Map the memory of another rank's pool, given its descriptor as received."""

    def descriptor(self, token: str) -> int | None:
        """Return a read-only descriptor of published memory that is a file, else None."""
        return None

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy from address to address, of a GPU or of registered host memory."""
        raise NotImplementedError(f"the {self.name} backend has no streams")

    def make_current(self) -> None:
        """Make this rank's GPU the current one of the calling thread."""

    def enter_thread(self) -> None:
        """Make this rank's GPU current in a thread of mpishare's own.

        Its calls then end no capture that another thread makes meanwhile.
        """

    def register(self, memory: SharedMemory) -> int:
        """Make host memory accessible to the GPU; return its device address, 0 without a GPU."""
        return 0

    def unregister(self, memory: SharedMemory) -> None:
        """Undo `register`."""

    def stream(self, stream: Any) -> tuple[int, Any]:
        """Return the handle of a stream in any accepted form, and an object that keeps it alive."""
        if stream is not None:
            handle_of(stream)
        return 0, None

    def enter(self, stream: Any) -> StreamInfo:
        """Return the stream of a call, in any accepted form; None: the current one."""
        return *self.stream(stream), True, False

    def new_stream(self) -> Any:
        """Create a stream of the highest priority, which waits for no default stream."""
        raise NotImplementedError(f"the {self.name} backend has no streams")

    def close_stream(self, stream: Any) -> None:
        """Destroy a stream of `new_stream`."""

    def is_current(self, stream: int, now: int | None = None) -> bool:
        """Whether a call without ``stream=`` would be enqueued on this stream now.

        `now` is the current one of a library other than CuPy.
        """
        return True

    def is_capturing(self, stream: int) -> bool:
        """Whether the stream is being captured into a graph."""
        return False

    def is_in_capture(self) -> bool:
        """Whether a current stream is being captured: then nothing can be closed."""
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

    def close_events(self, events: Sequence[Any]) -> None:
        """Destroy events."""

    def record(self, event: Any, stream: int) -> None:
        """Record an event on a stream."""

    def wait_event(self, event: Any, stream: int) -> None:
        """Let a stream wait for the latest record of an event."""

    def order(self, event: Any, first: int, then: int) -> None:
        """Let what comes on stream `then` wait for what is on `first`."""
        self.record(event, first)
        self.wait_event(event, then)

    def is_event_done(self, event: Any) -> bool:
        """Whether the latest record of an event is done; True if it was never recorded."""
        return True

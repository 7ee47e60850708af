"""The CUDA backend: plain device memory by legacy IPC handles, order by stream memory operations.

Nothing here is imported before a GPU was seen.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cupy

from mpishare.backends import Signals, driver
from mpishare.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mpishare.backends import Memory
    from mpishare.memory.shared import SharedMemory

SLAB = 2 << 20
"""Allocations are multiples of this, so that a handle never opens a neighbor's bytes with ours:
the driver places smaller ones several to a block, and a handle opens the whole block (CUDA
Programming Guide, interprocess communication)."""

DEFAULTS = 2
"""Up to this number a stream is a default one, of which every GPU has its own."""

_current_stream = cupy.cuda.get_current_stream
_current_device = cupy.cuda.runtime.getDevice
_Stream = cupy.cuda.Stream
_IPC_LAZY_PEER_ACCESS = 1
_STREAM_NON_BLOCKING = 1
_LOCAL_EVENT_FLAGS = 2  # no timing
_EVENT_FLAGS = 2 | 4  # no timing, interprocess
_HOST_REGISTER_FLAGS = 1 | 2  # portable, device map


class CudaMemory:
    """Device memory that this rank allocated or mapped."""

    def __init__(self, backend: CudaBackend, address: int, nbytes: int, *, is_mine: bool) -> None:
        self.nbytes = nbytes
        self.address = address
        self._backend = backend
        self._is_mine = is_mine
        self._anchor: Callable[[], _Anchor | None] = lambda: None

    @property
    def is_held(self) -> bool:
        """Whether arrays of it are alive."""
        return self._anchor() is not None

    def array(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return the first bytes as a CuPy array on this rank's device."""
        xp = self._backend.xp
        anchor = self._anchor()
        if anchor is None:
            anchor = _Anchor()
            self._anchor = weakref.ref(anchor)
        # The device is named, since a mapping of another GPU's memory is used from mine.
        memory = xp.cuda.UnownedMemory(
            self.address, self.nbytes, anchor, self._backend.device.ordinal
        )
        return xp.ndarray(shape, dtype=dtype, memptr=xp.cuda.MemoryPointer(memory, 0))

    def close(self) -> bool:
        """Unmap or free; False, and nothing done, where arrays of it are still alive."""
        if self.is_held:
            return False
        if self._is_mine:
            self._backend.call("cuMemFree", self.address)
        else:
            self._backend.call("cuIpcCloseMemHandle", self.address)
        return True


class _Anchor:
    """Alive as long as an array of one memory is."""

    __slots__ = ("__weakref__",)


class CudaBackend:
    """Memory, streams and order on the GPU of this rank.

    Parameters
    ----------
    ordinal : int
        The GPU's number in this process; it is made the current one.
    where : str
        Names this rank in errors, e.g. ``rank 3 of 4``.
    """

    name = "cuda"
    has_streams = True

    def __init__(self, ordinal: int, where: str) -> None:
        self.xp = cupy
        cupy.cuda.Device(ordinal).use()
        cupy.cuda.runtime.free(0)  # makes the primary context and makes it current
        self.device = driver.device_of(ordinal)
        self._ordinal = ordinal
        self._where = f"{where}, {self.device.uuid[:12]}"
        self._wait_flags = driver.wait_flags(ordinal)

    def call(self, name: str, *arguments: Any, todo: str = "") -> Any:
        """Call a driver function; return what it returns, or raise `CudaError`."""
        return driver.call(name, *arguments, where=self._where, todo=todo)

    def allocate(self, nbytes: int) -> CudaMemory:
        """Allocate a slab of plain device memory."""
        asked, nbytes = nbytes, -(-max(nbytes, 1) // SLAB) * SLAB
        address = self.call(
            "cuMemAlloc",
            nbytes,
            todo=f"{asked} bytes of GPU memory were asked for, {self._free()} are free: ask for "
            "less, or free CuPy's pool (cupy.get_default_memory_pool().free_all_blocks())",
        )
        return CudaMemory(self, int(address), nbytes, is_mine=True)

    def publish(self, memory: Memory) -> str:
        """Return the legacy IPC handle."""
        if not isinstance(memory, CudaMemory):
            raise TypeError(f"{memory!r} is no memory of this backend")
        return driver.handle_bytes(self.call("cuIpcGetMemHandle", memory.address)).hex()

    def open(self, token: str, nbytes: int, uuid: str) -> CudaMemory:
        """Map another rank's slab."""
        address = self.call(
            "cuIpcOpenMemHandle",
            driver.memory_handle(bytes.fromhex(token)),
            _IPC_LAZY_PEER_ACCESS,
            todo=f"This rank cannot map memory of {uuid[:12]}: if a SLURM step hides GPUs from "
            "ranks, ask for --gpus-per-node=N with --gpu-bind=none instead of --gpus-per-task; "
            "in a container give it all GPUs. `python -m mpishare.info` shows every pair",
        )
        return CudaMemory(self, int(address), nbytes, is_mine=False)

    def settle(self, token: str) -> None:
        """Nothing to take back: a handle is only a number."""

    def register(self, memory: SharedMemory) -> int:
        """Pin host memory and return where the GPU sees it."""
        self.call("cuMemHostRegister", memory.address, memory.nbytes, _HOST_REGISTER_FLAGS)
        return int(self.call("cuMemHostGetDevicePointer", memory.address, 0))

    def unregister(self, memory: SharedMemory) -> None:
        """Unpin it."""
        self.call("cuMemHostUnregister", memory.address)

    def enter(self, stream: Any, name: str, call: str) -> tuple[int, Any, bool]:
        """Return a stream's number, what keeps it alive, and whether that is sure to.

        Only a stream of CuPy's own is: behind a number, or behind another library's object, it may
        be destroyed at any time. Refuses a stream that is being captured.
        """
        number, owner, is_kept, is_captured = self.enter_any(stream)
        if is_captured:
            raise UnsupportedError(
                f"{name}: {call} failed: the stream is being captured into a graph. The value that "
                "is waited for would be baked in, and the second replay would pass early. Call it "
                "outside of the capture."
            )
        return number, owner, is_kept

    def enter_any(self, stream: Any) -> tuple[int, Any, bool, bool]:
        """As `enter`, and whether the stream is being captured into a graph."""
        if stream is None:
            owner = _current_stream(self.device.ordinal)
            number = owner.ptr
        else:
            number, owner = self.stream(stream)
        if number <= DEFAULTS and (current := _current_device()) != self.device.ordinal:
            raise ValueError(
                f"the default stream is that of the current GPU, which is {current}: the node of "
                f"this rank uses GPU {self.device.ordinal}. Make that the current one"
            )
        return number, owner, isinstance(owner, _Stream), driver.is_capturing(number)

    def is_current(self, stream: int) -> bool:
        """Whether CuPy's current stream is this one, of this GPU, and is not being captured."""
        ordinal = self._ordinal
        if _current_stream(ordinal).ptr != stream or driver.is_capturing(stream):
            return False
        return stream > DEFAULTS or _current_device() == ordinal

    def new_stream(self) -> Any:
        """Make a stream that is served before others, and waits for none."""
        _, highest = self.call("cuCtxGetStreamPriorityRange")
        return self.call("cuStreamCreateWithPriority", _STREAM_NON_BLOCKING, highest)

    def close_stream(self, stream: int) -> None:
        """Destroy a stream of `new_stream`."""
        self.call("cuStreamDestroy", stream)

    def stream(self, stream: Any) -> tuple[int, Any]:
        """Return a stream's number, and what keeps it alive.

        Takes CuPy's and PyTorch's streams, any `__cuda_stream__`, an int, or None.
        """
        if stream is None:
            current = _current_stream(self.device.ordinal)
            return current.ptr, current
        if isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
            return stream, None
        for name in ("ptr", "cuda_stream"):
            number = getattr(stream, name, None)
            if isinstance(number, int):
                return number, stream
        protocol = getattr(stream, "__cuda_stream__", None)
        if protocol is None:
            raise TypeError(
                f"stream must be None, an int >= 0, or an object with .ptr, .cuda_stream or "
                f"__cuda_stream__, not {stream!r}"
            )
        return int((protocol() if callable(protocol) else protocol)[1]), stream

    def local_event(self) -> Any:
        """Make an event for this process alone."""
        return self.call("cuEventCreate", _LOCAL_EVENT_FLAGS)

    def signals(self, operations: Sequence[tuple[str, int]]) -> Signals:
        """Prepare operations ``("write" | "wait", device address)``."""
        return driver.CudaSignals(operations, self._wait_flags, self._where)

    def events(self, count: int) -> tuple[list[Any], list[str]]:
        """Make interprocess events."""
        with self._all_or_none() as events:
            for _ in range(count):
                events.append(self.call("cuEventCreate", _EVENT_FLAGS))
            handles = [self.call("cuIpcGetEventHandle", event) for event in events]
        return events, [driver.handle_bytes(handle).hex() for handle in handles]

    def open_events(self, tokens: Sequence[str]) -> list[Any]:
        """Open another rank's events."""
        todo = "Interprocess events need one /dev/shm: start containers with --ipc=host"
        with self._all_or_none() as events:
            for token in tokens:
                handle = driver.event_handle(bytes.fromhex(token))
                events.append(self.call("cuIpcOpenEventHandle", handle, todo=todo))
        return events

    @contextlib.contextmanager
    def _all_or_none(self) -> Iterator[list[Any]]:
        events: list[Any] = []
        try:
            yield events
        except BaseException:
            self.close_events(events)
            raise

    def close_events(self, events: Sequence[Any]) -> None:
        """Destroy events."""
        for event in events:
            self.call("cuEventDestroy", event)

    def record(self, event: Any, stream: int) -> None:
        """Record an event on a stream."""
        self.call("cuEventRecord", event, stream)

    def wait_event(self, event: Any, stream: int) -> None:
        """Let a stream wait for the latest record of an event."""
        self.call("cuStreamWaitEvent", stream, event, 0)

    def is_capturing(self, stream: int) -> bool:
        """Whether the stream is being captured into a graph."""
        return driver.is_capturing(stream)

    def is_event_done(self, event: Any) -> bool:
        """Whether what an event recorded last is over; True for one that recorded nothing."""
        return driver.is_event_done(event, self._where)

    def is_done(self, stream: int) -> bool:
        """Whether all that was put on the stream is over."""
        return driver.is_done(stream, self._where)

    def drain(self, timeout_s: float) -> bool:
        """Wait for all streams of this process; False where that takes longer."""
        failures: list[BaseException] = []

        def synchronize() -> None:
            try:
                self.xp.cuda.Device(self.device.ordinal).use()
                self.call("cuCtxSynchronize")
            except BaseException as error:
                failures.append(error)

        # In a thread of its own, since the driver's wait has no deadline.
        thread = threading.Thread(target=synchronize, name="mpishare-drain", daemon=True)
        thread.start()
        thread.join(min(timeout_s, threading.TIMEOUT_MAX))
        if failures:
            raise failures[0]
        return not thread.is_alive()

    def _free(self) -> int:
        return int(self.xp.cuda.runtime.memGetInfo()[0])


def store(target: Any, value: int) -> None:
    """Store an 8-byte value by a kernel on the current stream, compiled at the first call."""
    source = Path(__file__).with_name("store.cu").read_text()
    cupy.RawKernel(source, "store")((1,), (1,), (target, cupy.uint64(value)))

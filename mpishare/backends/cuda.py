"""The CUDA backend: legacy IPC handles for memory, stream memory operations for counters.

Imported only where a GPU was found.
"""

from __future__ import annotations

import sys
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cupy

from mpishare.backends import Backend, driver, handle_of, kernels
from mpishare.backends.cuda_in_place import CudaInPlace
from mpishare.backends.cuda_memory import CudaMemory, Mappings, legacy_handle, open_legacy_handle
from mpishare.backends.cuda_pools import OwnCudaPool, PeerCudaPool
from mpishare.backends.driver import is_capturing
from mpishare.coordination.poll import poll
from mpishare.errors import CudaError, format_nbytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from mpishare.backends import Device, StreamInfo
    from mpishare.backends.driver import CudaSignals
    from mpishare.memory.fd_server import FdServer
    from mpishare.memory.memory import Memory
    from mpishare.memory.shared import SharedMemory

GRANULARITY = 2 << 20
"""Allocations are multiples of this: the driver places smaller ones several to a block, and an IPC
handle opens the whole block (CUDA Programming Guide, interprocess communication)."""

LAST_DEFAULT = 2
"""Stream handles up to this are default streams (null, legacy, per thread): one set per GPU."""

_current_stream = cupy.cuda.get_current_stream
_current_device = cupy.cuda.runtime.getDevice
_Stream = cupy.cuda.Stream
_is_capturing = cupy.cuda.runtime.streamIsCapturing
# A third of the time of cuda.bindings, as in `driver`.
_event_record = cupy.cuda.runtime.eventRecord
_stream_wait_event = cupy.cuda.runtime.streamWaitEvent
_RuntimeError = cupy.cuda.runtime.CUDARuntimeError
_STREAM_NON_BLOCKING = 1
_EVENT_FLAGS = 2  # no timing
_HOST_REGISTER_FLAGS = 1 | 2  # portable, device map

_UNAVAILABLE = 46
_IN_USE = (
    " In an exclusive compute mode several ranks of a GPU need the Multi-Process Service, "
    "`python -m mpishare.mps mpirun ...`; `nvidia-smi -q -d COMPUTE` shows the mode"
)

_pinned: dict[int, SharedMemory] = {}
"""By address, held until it is unpinned. A node that ends by an error unpins nothing: once its
memory were unmapped, the kernel would put another mapping there, which could not be pinned."""


class CudaBackend(Backend):
    """Memory, streams and events on the GPU of this rank, which becomes the current one."""

    name = "cuda"
    has_streams = True
    xp = cupy
    device: Device

    def __init__(self, ordinal: int, where: str) -> None:
        try:
            cupy.cuda.Device(ordinal).use()
            cupy.cuda.runtime.free(0)  # makes the primary context and makes it current
        except _RuntimeError as failure:
            name, _, text = str(failure).partition(": ")
            message = f"cudaSetDevice failed: {name}: {text} ({where})."
            message += _IN_USE if failure.status == _UNAVAILABLE else ""
            raise CudaError(
                message, call="cudaSetDevice", code=failure.status, name=name
            ) from failure
        self.device = driver.device_of(ordinal)
        self._ordinal = ordinal
        self._where = f"{where}, {self.device.uuid[:12]}"
        self._mappings = Mappings()
        self._wait_flags = driver.wait_flags(ordinal)
        self._primary = self.call("cuCtxGetCurrent")
        self._all_work: Any = None  # an event, made at its first use

    def call(self, name: str, *arguments: Any, remedy: str = "") -> Any:
        """Call a driver function; return its results, or raise `CudaError`."""
        return driver.call(name, *arguments, where=self._where, remedy=remedy)

    def allocate(self, nbytes: int) -> CudaMemory:
        """Allocate plain device memory, outside of any pool."""
        asked, nbytes = nbytes, -(-max(nbytes, 1) // GRANULARITY) * GRANULARITY
        left = format_nbytes(cupy.cuda.runtime.memGetInfo()[0])
        remedy = (
            f"{format_nbytes(asked)} of GPU memory were asked for, {left} are free: ask for less, "
            "or free CuPy's pool (cupy.get_default_memory_pool().free_all_blocks())"
        )
        address = self.call("cuMemAlloc", nbytes, remedy=remedy)
        free = partial(self.call, "cuMemFree", address)
        return CudaMemory(self._ordinal, int(address), nbytes, free)

    def publish(self, memory: Memory) -> str:
        """Return the legacy IPC handle."""
        return legacy_handle(memory.address, self._where)

    def open(self, token: str, nbytes: int, uuid: str) -> CudaMemory:
        address = open_legacy_handle(token, uuid, self._where)
        close = partial(self.call, "cuIpcCloseMemHandle", address)
        unmap = self._mappings.add(address, nbytes, close)
        return CudaMemory(self._ordinal, address, nbytes, unmap)

    def in_place(self, fd_server: FdServer, timeout_s: float) -> CudaInPlace:
        return CudaInPlace(self._ordinal, self._where, self._mappings, fd_server, timeout_s)

    def retract(self, token: str) -> None:
        """A handle holds no resources."""

    def create_pool(self, max_nbytes: int) -> OwnCudaPool:
        return OwnCudaPool(self.device, self._where, max_nbytes)

    def import_pool(self, fd: int) -> PeerCudaPool:
        return PeerCudaPool(fd, self.device, self._where)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy; unified addressing finds both memories."""
        self.call("cuMemcpyAsync", target, source, nbytes, stream)

    def upload(self, target: int, array: np.ndarray[Any, Any], stream: int) -> None:
        """Enqueue a copy from host memory, which the caller holds until it is done."""
        self.call("cuMemcpyHtoDAsync", target, array.ctypes.data, array.nbytes, stream)

    def zero(self, target: int, nbytes: int, stream: int) -> None:
        """Enqueue setting bytes to 0."""
        self.call("cuMemsetD8Async", target, 0, nbytes, stream)

    def make_current(self) -> None:
        self.xp.cuda.Device(self.device.ordinal).use()

    def enter_thread(self) -> None:
        self.make_current()
        self.call("cuThreadExchangeStreamCaptureMode", driver.CAPTURE_RELAXED)

    def register(self, memory: SharedMemory) -> int:
        address = memory.address
        self.call("cuMemHostRegister", address, memory.nbytes, _HOST_REGISTER_FLAGS)
        _pinned[address] = memory
        return int(self.call("cuMemHostGetDevicePointer", address, 0))

    def unregister(self, memory: SharedMemory) -> None:
        self.call("cuMemHostUnregister", memory.address)
        del _pinned[memory.address]

    def enter(self, stream: Any) -> StreamInfo:
        """Return the stream of a call.

        The default stream of a GPU lives on, and CuPy's own stream objects keep theirs alive: a
        stream behind a number, or behind another library's object, may be destroyed at any time.
        """
        if stream is None:
            owner = _current_stream(self._ordinal)
            handle = owner.ptr
        else:
            handle, owner = self.stream(stream)
        if handle <= LAST_DEFAULT and (current := _current_device()) != self._ordinal:
            raise ValueError(
                f"the default stream is that of the current GPU, which is {current}: the node of "
                f"this rank uses GPU {self._ordinal}. Make that the current one"
            )
        # That of a thread, the last of the default ones, is another one in other threads.
        stays_alive = handle < LAST_DEFAULT or isinstance(owner, _Stream)
        return handle, owner, stays_alive, is_capturing(handle)

    def is_current(self, stream: int, now: int | None = None) -> bool:
        """Whether this is the current stream, on the node's GPU, and is not being captured."""
        ordinal = self._ordinal
        try:  # as `is_capturing`, without a call: this is a part of every exchange and fence
            current = _current_stream(ordinal).ptr if now is None else now
            if current != stream or _is_capturing(stream):
                return False
        except _RuntimeError:
            return False  # `enter` raises the reason
        return stream > LAST_DEFAULT or _current_device() == ordinal

    def new_stream(self) -> Any:
        _, highest = self.call("cuCtxGetStreamPriorityRange")
        return self.call("cuStreamCreateWithPriority", _STREAM_NON_BLOCKING, int(highest))

    def close_stream(self, stream: int) -> None:
        self.call("cuStreamDestroy", stream)

    def stream(self, stream: Any) -> tuple[int, Any]:
        """Return a stream's handle, and an object that keeps it alive.

        Takes CuPy's and PyTorch's streams, any `__cuda_stream__`, an int, or None.
        """
        if stream is None:
            current = _current_stream(self.device.ordinal)
            return current.ptr, current
        return handle_of(stream), stream

    def local_event(self) -> Any:
        return int(self.call("cuEventCreate", _EVENT_FLAGS))

    def signals(self, operations: Sequence[tuple[str, int]]) -> CudaSignals:
        return driver.CudaSignals(operations, self._wait_flags, self._where)

    def close_events(self, events: Sequence[Any]) -> None:
        for event in events:
            self.call("cuEventDestroy", event)

    def record(self, event: Any, stream: int) -> None:
        # Compared first: a start and its wait record two events, and that call is 1 % of them.
        if stream <= LAST_DEFAULT and not self._is_here(stream):
            with cupy.cuda.Device(self._ordinal):
                self.record(event, stream)
            return
        try:
            _event_record(event, stream)
        except _RuntimeError as failure:
            raise driver.error("cuEventRecord", failure.status, self._where) from None

    def order(self, event: Any, first: int, then: int) -> None:
        if first <= LAST_DEFAULT:
            super().order(event, first, then)
            return
        try:  # without these calls, which are 2 % of a start and its wait
            _event_record(event, first)
            _stream_wait_event(then, event)
        except _RuntimeError as failure:
            call = "cuEventRecord, cuStreamWaitEvent"
            raise driver.error(call, failure.status, self._where) from None

    def wait_event(self, event: Any, stream: int) -> None:
        try:
            _stream_wait_event(stream, event)
        except _RuntimeError as failure:
            raise driver.error("cuStreamWaitEvent", failure.status, self._where) from None

    def is_capturing(self, stream: int) -> bool:
        return is_capturing(stream)

    def is_in_capture(self) -> bool:
        """Whether CuPy's or PyTorch's current stream is being captured."""
        streams = [_current_stream(self._ordinal).ptr]
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            streams.append(torch.cuda.current_stream(self._ordinal).cuda_stream)
        return any(map(is_capturing, streams))

    def is_event_done(self, event: Any) -> bool:
        return driver.is_event_done(event, self._where)

    def is_done(self, stream: int) -> bool:
        if not self._is_here(stream):
            with cupy.cuda.Device(self._ordinal):
                return self.is_done(stream)
        return driver.is_done(stream, self._where)

    def _is_here(self, stream: int) -> bool:
        """Whether a handle means the node's stream now: default ones are the current GPU's."""
        return stream > LAST_DEFAULT or _current_device() == self._ordinal

    def drain(self, timeout_s: float) -> bool:
        if not driver.has_context_events():
            return self._drain_in_thread(timeout_s)
        if self._all_work is None:
            self._all_work = self.local_event()
        self.call("cuCtxRecordEvent", self._primary, self._all_work)
        return poll(lambda: self.is_event_done(self._all_work), timeout_s)

    def _drain_in_thread(self, timeout_s: float) -> bool:
        failures: list[BaseException] = []

        def synchronize() -> None:
            try:
                self.make_current()
                self.call("cuCtxSynchronize")
            except BaseException as error:
                failures.append(error)

        # In a thread, since the driver's wait has no deadline.
        thread = threading.Thread(target=synchronize, name="mpishare-drain", daemon=True)
        thread.start()
        thread.join(min(timeout_s, threading.TIMEOUT_MAX))
        if failures:
            raise failures[0]
        return not thread.is_alive()


def store(target: Any, value: int) -> None:
    """Store 8 bytes with a kernel on the current stream; the first call compiles it."""
    code = Path(__file__).with_name("store.cu").read_text()
    kernels.module(code).get_function("store")((1,), (1,), (target, cupy.uint64(value)))

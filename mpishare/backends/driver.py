"""The CUDA driver: its calls, its errors, its handles, its devices.

It, `cuda_pools` and `cuda_graphs` alone use cuda.bindings. Imported only where a GPU was found.
"""

from __future__ import annotations

import ctypes
import operator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import cupy
from cuda.bindings import driver

from mpishare.backends import Device
from mpishare.backends.presence import library
from mpishare.errors import CudaError, UnsupportedError
from mpishare.memory.arguments import is_int
from mpishare.memory.kinds import MemoryType, PointerAttributes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_NOT_READY = 600
_CAPTURE_IMPLICIT = 906
# CuPy's functions take a third of the time of cuda.bindings or ctypes.
_is_capturing = cupy.cuda.runtime.streamIsCapturing
graph_launch = cupy.cuda.runtime.graphLaunch
_launch_kernel = cupy.cuda.driver.launchKernel
_DriverError = cupy.cuda.driver.CUDADriverError
_WAIT_64, _WRITE_64 = 4, 5
_FLUSH = 1 << 30
# Memory pools may grow meanwhile, here and in other threads.
CAPTURE_RELAXED = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
CAPTURE_THIS_THREAD = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
POSIX_FD = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
READ_WRITE = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
# By number, and by ctypes: not every cuda.bindings has all of them.
_ATTRIBUTES = {
    "memory_type": 2,
    "buffer_id": 7,
    "is_managed": 8,
    "ordinal": 9,
    "has_legacy_handle": 10,
    "start": 11,
    "nbytes": 12,
    "handle_types": 14,
    "pool": 17,
}
_FLAGS = ("is_managed", "has_legacy_handle")
_MAPPING = 19, 18
_BATCH = 255  # operations a call: "must be less than 256" (CUDA driver API, cuStreamBatchMemOp)
_MODULE_VERSION = Path("/sys/module/nvidia/version")
_PARAM_WORDS = 6  # CUstreamBatchMemOpParams: operation, address, value, flags, alias, padding


def call(name: str, *arguments: Any, where: str = "", remedy: str = "") -> Any:
    """Call a driver function; return its results, or raise `CudaError`."""
    code, *values = getattr(driver, name)(*arguments)
    if int(code):
        raise error(name, int(code), where, remedy)
    return values[0] if len(values) == 1 else tuple(values)


def has_context_events() -> bool:
    """Whether an event can be recorded behind all work of a context, as from CUDA 12.5."""
    return hasattr(driver, "cuCtxRecordEvent") and int(call("cuDriverGetVersion")) >= 12050


def error(name: str, code: int, where: str, remedy: str = "") -> CudaError:
    """Return the error for a result code of a driver function."""
    result = driver.CUresult(code)
    code_of_text, text = driver.cuGetErrorString(result)
    description = "no description" if int(code_of_text) else text.decode()
    message = f"{name} failed: {result.name}: {description} ({where})." + (
        f" {remedy}." if remedy else ""
    )
    return CudaError(message, call=name, code=code, name=result.name)


def handle_bytes(handle: Any) -> bytes:
    """Return the 64 bytes of an IPC handle."""
    # By address, since the field's name differs between versions of cuda-bindings.
    return ctypes.string_at(int(handle.getPtr()), 64)


def handle_of(kind: str, data: bytes) -> Any:
    """Return a handle of some kind, a record of the driver's, from its 64 bytes."""
    handle = getattr(driver, kind)()
    ctypes.memmove(int(handle.getPtr()), data, 64)
    return handle


def pointer_attributes(address: int) -> PointerAttributes | None:
    """Return the driver's attributes of an address; None if it has no memory there."""
    values = {name: _pointer_attribute(number, address) for name, number in _ATTRIBUTES.items()}
    if not values["memory_type"]:
        return None
    known = {name: value or 0 for name, value in values.items()}
    return PointerAttributes(
        **{name: bool(v) if name in _FLAGS else v for name, v in known.items()}  # type: ignore[arg-type]
    )


def is_plain(address: int) -> bool:
    """Whether memory is of ``cuMemAlloc``, not of a pool, managed, or mapped from chunks."""
    found = pointer_attributes(address)
    return (
        found is not None
        and found.memory_type == MemoryType.DEVICE
        and found.has_legacy_handle
        and not found.is_managed
    )


def mapping(address: int) -> tuple[int, int]:
    """Return the begin and the bytes of the chunk that is mapped at an address."""
    start, nbytes = (_pointer_attribute(number, address) for number in _MAPPING)
    if not start or not nbytes:
        raise UnsupportedError(f"no memory is mapped at address {address:#x}")
    return start, nbytes


def _pointer_attribute(number: int, address: int) -> int | None:
    """Return an attribute of 4 or 8 bytes; None if the driver has none."""
    value = ctypes.c_uint64(0)
    failed = library().cuPointerGetAttribute(
        ctypes.byref(value), ctypes.c_int(number), ctypes.c_uint64(address)
    )
    return None if failed else value.value


def location(ordinal: int) -> Any:
    """Return the driver's record of a GPU's memory."""
    found = driver.CUmemLocation()
    found.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    found.id = ordinal
    return found


def read_write_access(ordinal: int) -> Any:
    """Return the driver's record of a GPU that may read and write."""
    access = driver.CUmemAccessDesc()
    access.location = location(ordinal)
    access.flags = READ_WRITE
    return access


def wait_flags(ordinal: int) -> int:
    """Return the flags of a stream's wait: flush remote writes, on GPUs that need this."""
    can_flush = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES
    return _FLUSH if call("cuDeviceGetAttribute", can_flush, ordinal) else 0


def is_done(stream: int, where: str) -> bool:
    return _is_over("cuStreamQuery", stream, where)


def is_event_done(event: Any, where: str) -> bool:
    """Whether the latest record of an event is done; True if it was never recorded."""
    return _is_over("cuEventQuery", event, where)


def _is_over(query: str, what: Any, where: str) -> bool:
    (code,) = getattr(driver, query)(what)
    if int(code) not in (0, _NOT_READY):
        raise error(query, int(code), where)
    return not int(code)


def is_capturing(stream: int) -> bool:
    """Whether the stream is being captured, or cannot be used because another one is."""
    try:
        return _is_capturing(stream)  # type: ignore[no-any-return]
    except cupy.cuda.runtime.CUDARuntimeError as failure:
        if failure.status != _CAPTURE_IMPLICIT:
            raise
        return True  # the legacy default stream during any capture in this process


class CudaSignals:
    """Prepared stream memory operations, in order: ``("write" | "wait", device address)``.

    By ctypes and in place: filling the parameter objects of cuda.bindings takes longer than the
    driver's call, which applications make at every step.
    """

    def __init__(self, operations: Sequence[tuple[str, int]], flags: int, where: str) -> None:
        own, rest = operations[:_BATCH], operations[_BATCH:]
        self._where = where
        self._count = len(own)
        self._params = (ctypes.c_uint64 * (_PARAM_WORDS * len(own)))()
        for index, (kind, address) in enumerate(own):
            self._params[_PARAM_WORDS * index] = _WAIT_64 if kind == "wait" else _WRITE_64
            self._params[_PARAM_WORDS * index + 1] = address
            self._params[_PARAM_WORDS * index + 3] = flags if kind == "wait" else 0
        self._rest = CudaSignals(rest, flags, where) if rest else None
        # No argtypes: their conversions take longer than the call's own.
        self._call = library().cuStreamBatchMemOp_v2
        self._handle = 0
        self._stream = ctypes.c_void_p(0)

    def enqueue(self, stream: int, values: Sequence[int]) -> None:
        """Enqueue them on a stream, in as few batches as the driver takes."""
        if stream != self._handle:
            self._handle, self._stream = stream, ctypes.c_void_p(stream)
        params, place = self._params, 2
        for value in values if self._rest is None else values[:_BATCH]:
            params[place] = value
            place += _PARAM_WORDS
        if code := self._call(self._stream, self._count, params, 0):
            raise error("cuStreamBatchMemOp", code, self._where)
        if self._rest is not None:
            self._rest.enqueue(stream, values[_BATCH:])


def choose_device(wanted: Any, rank: int) -> int:
    """Return the ordinal of the GPU for a rank of the node.

    `wanted` is an ordinal, a UUID or its begin, a CuPy device, or None: the one GPU with an active
    primary context, the current one of several, else round robin by rank.
    """
    count = cupy.cuda.runtime.getDeviceCount()
    wanted = getattr(wanted, "id", wanted)
    if wanted is None:
        states = [call("cuDevicePrimaryCtxGetState", ordinal) for ordinal in range(count)]
        active = [ordinal for ordinal, (_, is_active) in enumerate(states) if is_active]
        if len(active) == 1:
            return active[0]
        return int(cupy.cuda.runtime.getDevice()) if active else rank % count
    if isinstance(wanted, str):
        return _device_named(wanted)
    if not is_int(wanted):
        raise TypeError(f"device must be an ordinal, a UUID or None, not {wanted!r}")
    if not 0 <= wanted < count:
        raise ValueError(f"device={wanted}: this rank sees GPUs 0 to {count - 1}")
    return int(wanted)


def _device_named(begin: str) -> int:
    names = visible_uuids()
    found = [ordinal for ordinal, name in enumerate(names) if name.startswith(begin)]
    if len(found) != 1:
        raise ValueError(f"device={begin!r} names {len(found)} of this rank's GPUs: {names}")
    return found[0]


def uuid_of(ordinal: int) -> str:
    """Return the UUID of a GPU, without making a context on it."""
    text = bytes(call("cuDeviceGetUuid", ordinal).bytes)[:16].hex()
    return "GPU-" + "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def device_of(ordinal: int) -> Device:
    """Describe the GPU of the current context."""
    properties = cupy.cuda.runtime.getDeviceProperties(ordinal)
    # Drivers before CUDA 12 lack the attribute: then no MPS is assumed.
    mps = getattr(driver.CUdevice_attribute, "CU_DEVICE_ATTRIBUTE_MPS_ENABLED", None)
    return Device(
        ordinal=ordinal,
        uuid=uuid_of(ordinal),
        pci_id=cupy.cuda.runtime.deviceGetPCIBusId(ordinal).lower(),
        name=properties["name"].decode(),
        mps=bool(mps and call("cuDeviceGetAttribute", mps, ordinal)),
        compute_capability=f"{properties['major']}.{properties['minor']}",
        driver=_driver_version(),
    )


def _driver_version() -> str:
    number = int(call("cuDriverGetVersion"))
    version = f"CUDA {number // 1000}.{number % 1000 // 10}"
    try:
        return f"{_MODULE_VERSION.read_text().strip()} ({version})"
    except OSError:
        return version  # where a container hides it


def visible_uuids() -> list[str]:
    """Return the UUIDs of the GPUs that this process sees, by ordinal."""
    return [uuid_of(ordinal) for ordinal in range(cupy.cuda.runtime.getDeviceCount())]


def link(ordinal: int, uuid: str) -> str:
    """Return how this rank's GPU reaches another: ``same GPU``, ``NVLink``, ``PCIe``, ``peer``."""
    for other in range(cupy.cuda.runtime.getDeviceCount()):
        if uuid_of(other) == uuid:
            if other == ordinal:
                return "same GPU"
            # Only NVLink carries native atomics between two discrete GPUs.
            native = driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
            atomics = call("cuDeviceGetP2PAttribute", native, ordinal, other)
            return "NVLink" if atomics else "PCIe"
    return "peer"  # this process cannot see that GPU


class Enqueued(Protocol):
    """A launch, or several, or signals."""

    def enqueue(self, stream: int) -> None: ...


class Launch:
    """A prepared launch of blocks (`grid`) of threads.

    `arguments` of ctypes are read at each launch. Ints are for parameters of up to 8 bytes: the
    driver takes as many of the first bytes as a parameter has, which are the lowest ones on every
    host with a GPU.
    """

    def __init__(
        self, function: int, grid: int, block: int, arguments: Sequence[Any], where: str
    ) -> None:
        self._where = where
        held = [
            ctypes.c_uint64(operator.index(each)) if hasattr(each, "__index__") else each
            for each in arguments
        ]
        self._arguments = held
        self._places = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
        self.shape = function, grid, 1, 1, block, 1, 1, 0
        self.places = ctypes.addressof(self._places)

    def enqueue(self, stream: int) -> None:
        try:
            _launch_kernel(*self.shape, stream, self.places, 0)
        except _DriverError as failure:
            raise error("cuLaunchKernel", failure.status, self._where) from None


class CudaGraph:
    """A graph for launches; `handle` is for `launch_graph`."""

    def __init__(self, graph: Any, flags: int, where: str) -> None:
        self._graph = call("cuGraphInstantiate", graph, flags, where=where)
        self._where = where
        self.handle = int(self._graph)

    def close(self) -> None:
        """Destroy it; launches that were enqueued still run. No effect if repeated."""
        if self.handle:
            self.handle = 0
            call("cuGraphExecDestroy", self._graph, where=self._where)


class Step(NamedTuple):
    """What a function enqueues on the stream that it is given."""

    enqueue: Callable[[int], None]


class InOrder:
    """Several launches or signals of one call, enqueued in order."""

    def __init__(self, parts: Sequence[Enqueued]) -> None:
        self._parts = parts

    def enqueue(self, stream: int) -> None:
        for part in self._parts:
            part.enqueue(stream)


def launch_graph(graph: int, stream: int, where: str) -> None:
    try:
        graph_launch(graph, stream)
    except cupy.cuda.runtime.CUDARuntimeError as failure:
        # The runtime's error codes equal the driver's.
        raise error("cudaGraphLaunch", failure.status, where) from None

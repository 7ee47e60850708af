"""Device memory as one rank holds it: its own, or a mapping of another rank's."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import cupy

from mpishare.backends import driver, nvml
from mpishare.errors import CudaError

if TYPE_CHECKING:
    from collections.abc import Callable

_IPC_LAZY_PEER_ACCESS = 1
_INVALID_CONTEXT = 201  # the error of a process that opens a handle of its own


def legacy_handle(address: int, where: str) -> str:
    """Return the legacy IPC handle of the block that begins at an address."""
    return driver.handle_bytes(driver.call("cuIpcGetMemHandle", address, where=where)).hex()


def open_legacy_handle(token: str, uuid: str, where: str) -> int:
    """Map a block of another rank; return its address."""
    name, handle = "cuIpcOpenMemHandle", driver.memory_handle(bytes.fromhex(token))
    try:
        address = driver.call(name, handle, _IPC_LAZY_PEER_ACCESS, where=where)
    except CudaError as error:
        raise driver.error(name, error.code, where, _remedy(uuid, error.code)) from None
    return int(address)


def _remedy(uuid: str, code: int) -> str:
    """Return why memory of a GPU may not be mapped here, and a remedy, from NVML."""
    if code == _INVALID_CONTEXT:  # the driver knows the owner by its process id
        return (
            "The owner has the process id of this process, in a PID namespace of its own: start "
            "the containers with --pid=host"
        )
    own = driver.uuid_of(cupy.cuda.runtime.getDevice())
    return (
        f"This process cannot map memory of {uuid[:12]}. {nvml.why_unmapped(own, uuid)}. If a "
        "SLURM step hides GPUs from ranks, ask for --gpus-per-node=N alone, without "
        "--gpus-per-task and --gpu-bind, or give srun --gres-flags=allow-task-sharing (SLURM "
        "23.11.4 or newer); in a container give it all GPUs. `python -m mpishare.info` shows every "
        "pair"
    )


class Anchor:
    """Lives as long as an array on one memory; holds the objects that the array needs."""

    __slots__ = ("__weakref__", "source")

    def __init__(self, source: Any) -> None:
        self.source = source


class CudaMemory:
    """Device memory that this rank allocated or mapped, used from its GPU wherever it is."""

    is_given = False
    token = ""

    def __init__(self, ordinal: int, address: int, nbytes: int, free: Callable[[], Any]) -> None:
        self.nbytes = nbytes
        self.address = address
        self._ordinal = ordinal
        self._free = free
        self._source: Any = None
        self._anchor: Callable[[], Anchor | None] = lambda: None

    @property
    def is_held(self) -> bool:
        return self._anchor() is not None

    def array(
        self,
        shape: tuple[int, ...],
        dtype: Any,
        strides: tuple[int, ...] | None = None,
        offset: int = 0,
    ) -> Any:
        anchor = self._anchor()
        if anchor is None:
            anchor = Anchor(self._source)
            self._anchor = weakref.ref(anchor)
        # This rank's device, even for memory of another GPU: kernels use it from here.
        memory = cupy.cuda.UnownedMemory(self.address, self.nbytes, anchor, self._ordinal)
        pointer = cupy.cuda.MemoryPointer(memory, offset)
        return cupy.ndarray(shape, dtype=dtype, memptr=pointer, strides=strides)

    def when_dropped(self, then: Callable[[], object]) -> None:
        """Call `then` when the last array on it is gone; not at exit of the interpreter."""
        if (anchor := self._anchor()) is not None:
            weakref.finalize(anchor, then).atexit = False

    def close(self) -> bool:
        if self.is_held:
            return False
        self._free()
        return True


_given: set[GivenMemory] = set()
"""Held until it is closed: where a node ends by an error, others may still write into it."""


class GivenMemory(CudaMemory):
    """The user's own memory, shared in place, and kept alive by `source` until it is closed."""

    is_given = True

    def __init__(
        self, ordinal: int, address: int, nbytes: int, free: Callable[[], Any], source: Any
    ) -> None:
        super().__init__(ordinal, address, nbytes, free)
        self._source = source
        _given.add(self)

    @property
    def is_held(self) -> bool:
        """False: its arrays hold the source themselves."""
        return False

    def close(self) -> bool:
        """Drop the source. May be repeated."""
        if self in _given:
            _given.remove(self)
            self._free()
            self._source = None
        return True


class Mappings:
    """The address ranges in which this process maps memory of others."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def add(self, address: int, nbytes: int, close: Callable[[], Any]) -> Callable[[], None]:
        """Add a mapping; return a function that removes it."""
        mapped = address, nbytes
        self._ranges.append(mapped)

        def unmap() -> None:
            self._ranges.remove(mapped)
            close()

        return unmap

    def has(self, address: int) -> bool:
        """Whether an address is in one."""
        return any(start <= address < start + n for start, n in self._ranges)

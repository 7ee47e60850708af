"""Device memory as one rank holds it: its own, or a mapping of another rank's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cupy

from mpishare.backends import driver
from mpishare.errors import CudaError
from mpishare.memory.memory import Memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.memory.memory import ArrayLayout

_IPC_LAZY_PEER_ACCESS = 1
_INVALID_CONTEXT = 201  # the error of a process that opens a handle of its own


def legacy_handle(address: int, where: str) -> str:
    """Return the legacy IPC handle of the block that begins at an address."""
    return driver.handle_bytes(driver.call("cuIpcGetMemHandle", address, where=where)).hex()


def open_legacy_handle(token: str, uuid: str, where: str) -> int:
    """Map a block of another rank; return its address."""
    name, handle = "cuIpcOpenMemHandle", driver.handle_of("CUipcMemHandle", bytes.fromhex(token))
    try:
        address = driver.call(name, handle, _IPC_LAZY_PEER_ACCESS, where=where)
    except CudaError as error:
        raise driver.error(name, error.code, where, _remedy(uuid, error.code)) from None
    return int(address)


def _remedy(uuid: str, code: int) -> str:
    """Return why memory of a GPU may not be mapped here, and a remedy."""
    if code == _INVALID_CONTEXT:  # the driver knows the owner by its process id
        return (
            "The owner has the process id of this process, in a PID namespace of its own: start "
            "the containers with --pid=host"
        )
    return (
        f"This process cannot map memory of {uuid[:12]}. If a SLURM step hides GPUs, ask "
        "for --gpus-per-node=N alone, without --gpus-per-task and --gpu-bind, or give srun "
        "--gres-flags=allow-task-sharing (SLURM 23.11.4 or newer); in a container give it all "
        "GPUs. `python -m mpishare.info` shows every pair, and why (P2P, MIG, hidden GPUs)"
    )


class Anchor:
    """Lives as long as an array on one memory, or on one opening of a pool's block."""

    __slots__ = ("__weakref__",)


def cuda_array(anchor: Any, address: int, nbytes: int, ordinal: int, layout: ArrayLayout) -> Any:
    """Return an array that holds the anchor.

    On this rank's GPU, even for memory of another one: kernels use it from here.
    """
    memory = cupy.cuda.UnownedMemory(address, nbytes, anchor, ordinal)
    pointer = cupy.cuda.MemoryPointer(memory, layout.offset)
    return cupy.ndarray(layout.shape, dtype=layout.dtype, memptr=pointer, strides=layout.strides)


class CudaMemory(Memory):
    """Device memory that this rank allocated or mapped, used from its GPU wherever it is."""

    def __init__(self, ordinal: int, address: int, nbytes: int, free: Callable[[], Any]) -> None:
        super().__init__(address, nbytes)
        self._ordinal = ordinal
        self._free = free

    def part(self, offset: int, nbytes: int, free: Callable[[], object]) -> Memory:
        return CudaMemory(self._ordinal, self.address + offset, nbytes, free)

    def _new_anchor(self) -> Any:
        return Anchor()

    def _array(self, anchor: Any, layout: ArrayLayout) -> Any:
        return cuda_array(anchor, self.address, self.nbytes, self._ordinal, layout)

    def _release(self) -> None:
        self._free()


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

    def _hold(self) -> Any:
        return self._source  # held by its arrays: it can be closed before them

    def _release(self) -> None:
        if self in _given:  # may be repeated
            _given.remove(self)
            self._free()
            self._source = None


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

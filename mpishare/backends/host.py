"""The host backend: NumPy arrays in shared memory. Calls block, so there are no streams."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.backends import Backend, InPlace
from mpishare.backends.host_pool import HostPool
from mpishare.memory import shared
from mpishare.memory.kinds import POOLED
from mpishare.memory.memory import Memory, host_anchor, host_array

if TYPE_CHECKING:
    from mpishare.backends import Exported
    from mpishare.memory.descriptors import Descriptors
    from mpishare.memory.kinds import Refusal
    from mpishare.memory.memory import Shape
    from mpishare.memory.shared import SharedMemory


class HostMemory(Memory):
    """Shared host memory as one rank maps it."""

    def __init__(self, memory: SharedMemory) -> None:
        super().__init__(memory.address, memory.nbytes)
        self._memory: SharedMemory | None = memory

    def publish(self) -> str:
        """Give the memory a name."""
        return shared.publish(self._open())

    def retract(self, name: str) -> None:
        """Remove the name, and close the file: the mapping does not need it."""
        shared.forget(name)
        if self._memory is not None:
            self._memory.close_file()

    def close(self) -> bool:
        """Unmap; memory with live arrays is unmapped with the last of them."""
        self._release()
        return True

    def _open(self) -> SharedMemory:
        if self._memory is None:
            raise ValueError("the memory is closed")
        return self._memory

    def _new_anchor(self) -> Any:
        return host_anchor(self._open().buffer)

    def _array(
        self, anchor: Any, shape: Shape, dtype: Any, strides: Shape | None, offset: int
    ) -> Any:
        return host_array(anchor, shape, dtype, strides, offset)

    def _release(self) -> None:
        if self._memory is not None:
            self._memory.close()
        self._memory = None


class HostBackend(Backend):
    """Memory in /dev/shm. Calls block until the host has seen the counters: no streams."""

    name = "host"
    xp = np

    def __init__(self) -> None:
        self._published: dict[str, HostMemory] = {}
        self._pools: weakref.WeakSet[HostPool] = weakref.WeakSet()

    def allocate(self, nbytes: int) -> HostMemory:
        return HostMemory(shared.create(nbytes))

    def publish(self, memory: Memory) -> str:
        if not isinstance(memory, HostMemory):
            raise TypeError(f"{memory!r} is not memory of the host backend")
        token = memory.publish()
        self._published[token] = memory
        return token

    def open(self, token: str, nbytes: int, uuid: str) -> HostMemory:  # noqa: ARG002  no GPU
        memory = shared.attach(token, nbytes)
        memory.close_file()
        return HostMemory(memory)

    def descriptor(self, token: str) -> int:
        return shared.open_file(token, os.O_RDONLY)

    def retract(self, token: str) -> None:
        self._published.pop(token).retract(token)

    def in_place(self, descriptors: Descriptors, timeout_s: float) -> HostInPlace:  # noqa: ARG002
        return HostInPlace(self._pools)

    def create_pool(self, max_nbytes: int) -> HostPool:
        """Make a sparse memory file."""
        return self._noted(HostPool.create(max_nbytes))

    def import_pool(self, fd: int) -> HostPool:
        return self._noted(HostPool.import_(fd))

    def _noted(self, pool: HostPool) -> HostPool:
        self._pools.add(pool)
        return pool


class HostInPlace(InPlace):
    """Refuses NumPy arrays outside of windows, with the reason."""

    def __init__(self, pools: weakref.WeakSet[HostPool]) -> None:
        self._pools = pools

    def export(
        self, source: Any, address: int, nbytes: int, *, is_host: bool
    ) -> Exported | Refusal:
        if any(pool.has(address) for pool in self._pools):
            return POOLED
        return super().export(source, address, nbytes, is_host=is_host)

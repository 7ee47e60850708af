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

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.backends import Exported, Memory
    from mpishare.memory.descriptors import Descriptors
    from mpishare.memory.kinds import Refusal
    from mpishare.memory.shared import SharedMemory


class HostMemory:
    """Shared host memory as one rank maps it."""

    is_given = False

    def __init__(self, memory: SharedMemory) -> None:
        self._memory: SharedMemory | None = memory
        self._whole: Callable[[], np.ndarray[Any, Any] | None] = lambda: None
        self.nbytes = memory.nbytes
        self.address = memory.address

    @property
    def is_held(self) -> bool:
        """Whether arrays on it are alive."""
        return self._whole() is not None

    def array(
        self,
        shape: tuple[int, ...],
        dtype: Any,
        strides: tuple[int, ...] | None = None,
        offset: int = 0,
    ) -> np.ndarray[Any, Any]:
        """Return the bytes from `offset` on as an array, which keeps the mapping alive."""
        # An array made on the mapping itself does not keep it from being unmapped; one made by
        # frombuffer does, and it is the base of all others.
        whole = self._whole()
        if whole is None:
            if self._memory is None:
                raise ValueError("the memory is closed")
            whole = np.frombuffer(self._memory.buffer, dtype=np.uint8)
            self._whole = weakref.ref(whole)
        return np.ndarray(shape, dtype, buffer=whole, offset=offset, strides=strides)

    def publish(self) -> str:
        """Give the memory a name."""
        if self._memory is None:
            raise ValueError("the memory is closed")
        return shared.publish(self._memory)

    def retract(self, name: str) -> None:
        """Remove the name, and close the file: the mapping does not need it."""
        shared.forget(name)
        if self._memory is not None:
            self._memory.close_file()

    def close(self) -> bool:
        """Unmap; where arrays are alive, the memory is unmapped with the last of them."""
        if self._memory is not None:
            self._memory.close_file()
            if not self.is_held:
                self._memory.close()
        self._memory = None
        return True


class HostBackend(Backend):
    """Memory in /dev/shm. Calls block until the host has seen the counters: no streams."""

    name = "host"
    xp = np

    def __init__(self) -> None:
        self._published: dict[str, HostMemory] = {}
        self._pools: weakref.WeakSet[HostPool] = weakref.WeakSet()

    def allocate(self, nbytes: int) -> HostMemory:
        """Reserve shared memory."""
        return HostMemory(shared.create(nbytes))

    def publish(self, memory: Memory) -> str:
        """Give the memory a name."""
        if not isinstance(memory, HostMemory):
            raise TypeError(f"{memory!r} is not memory of the host backend")
        token = memory.publish()
        self._published[token] = memory
        return token

    def open(self, token: str, nbytes: int, uuid: str) -> HostMemory:  # noqa: ARG002  no GPU
        """Map memory that another rank reserved."""
        memory = shared.attach(token, nbytes)
        memory.close_file()
        return HostMemory(memory)

    def descriptor(self, token: str) -> int:
        """Open the file for reading alone."""
        return shared.open_file(token, os.O_RDONLY)

    def retract(self, token: str) -> None:
        """Remove the name."""
        self._published.pop(token).retract(token)

    def in_place(self, descriptors: Descriptors, timeout_s: float) -> HostInPlace:  # noqa: ARG002
        """Return why memory that exists already is not shared."""
        return HostInPlace(self._pools)

    def create_pool(self, max_nbytes: int) -> HostPool:
        """Make a sparse memory file."""
        return self._noted(HostPool.create(max_nbytes))

    def import_pool(self, fd: int) -> HostPool:
        """Map another rank's."""
        return self._noted(HostPool.import_(fd))

    def _noted(self, pool: HostPool) -> HostPool:
        self._pools.add(pool)
        return pool


class HostInPlace(InPlace):
    """Says of a NumPy array that is in no window why the others cannot map it.

    Parameters
    ----------
    pools : WeakSet of HostPool
        Those of the node, whose arrays travel in their own way.
    """

    def __init__(self, pools: weakref.WeakSet[HostPool]) -> None:
        self._pools = pools

    def export(
        self, source: Any, address: int, nbytes: int, *, is_host: bool
    ) -> Exported | Refusal:
        """Return the reason."""
        if any(pool.has(address) for pool in self._pools):
            return POOLED
        return super().export(source, address, nbytes, is_host=is_host)

"""Blocks of sparse files on the host: of a pool, cut by its owner, and of the node's small windows.

Pages are reserved when a block first needs them, so that no access is a SIGBUS. Those of freed
blocks stay reserved, for the next blocks.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.backends.suballocator import ALIGN, FreeList, rounded
from mpishare.errors import HandleError, UnsupportedError, format_nbytes
from mpishare.memory import shared
from mpishare.memory.kinds import POOLED
from mpishare.memory.memory import address_of, host_anchor, host_array, root_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.memory.memory import ArrayLayout
    from mpishare.memory.shared import SharedMemory

_STEP_NBYTES = 2 << 20
"""Pages are reserved in steps of this: a system call per block would cost more than the block."""


class Region:
    """A part of a sparse file, whole pages, as its owner cuts it into blocks."""

    def __init__(self, memory: SharedMemory, start: int, nbytes: int, step_nbytes: int) -> None:
        self._memory, self._start, self._nbytes, self._step = memory, start, nbytes, step_nbytes
        self._spans = FreeList(nbytes)
        self._n_reserved = 0

    @property
    def largest(self) -> int:
        """The size of the largest free span."""
        return self._spans.largest

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of a block in the file; None if there is no room in the region."""
        size = rounded(nbytes)
        begin = self._spans.allocate(size)
        if begin is None:
            return None
        try:
            self._reserve(begin + size)
        except UnsupportedError:
            self._spans.free(begin, size)
            raise
        return self._start + begin

    def free(self, begin: int, nbytes: int) -> None:
        self._spans.free(begin - self._start, rounded(nbytes))

    def _reserve(self, end: int) -> None:
        if end > self._n_reserved:
            end = min(-(-end // self._step) * self._step, self._nbytes)
            at = self._start + self._n_reserved
            shared.reserve(self._memory, at, end - self._n_reserved)
            self._n_reserved = end


class HostPool:
    """A sparse memory file as its owner or another rank maps it; see `OwnMemory`, `PeerMemory`."""

    refusal = POOLED

    def __init__(self, memory: SharedMemory, max_nbytes: int = 0) -> None:
        self._memory = memory
        self._base = memory.address
        self._end = self._base + memory.nbytes
        self._region = Region(memory, 0, memory.nbytes, _STEP_NBYTES)
        self._max_nbytes = max_nbytes

    def export(self) -> int:
        """Return a descriptor of the file, which the caller closes."""
        return os.dup(self._memory.fd)

    def allocate(self, nbytes: int, stream: int) -> int:  # noqa: ARG002  calls block
        begin = self._region.allocate(nbytes)
        if begin is None:
            whole = format_nbytes(self._memory.nbytes)
            limit, remedy = f"max_nbytes={whole}", "make it with a larger max_nbytes"
            if not self._max_nbytes:
                limit, remedy = f"the {whole} that {shared.FOLDER} had left", "ask for less"
            raise UnsupportedError(
                f"{format_nbytes(nbytes)} were asked for, and the largest room in the pool is "
                f"{format_nbytes(self._region.largest)}, of {limit}. Drop arrays of the pool on "
                f"all ranks, or {remedy}."
            )
        return self._base + begin

    def free(self, blocks: Sequence[tuple[int, int, int]]) -> None:
        for address, nbytes, _ in blocks:
            self._region.free(address - self._base, nbytes)

    def publish(self, address: int) -> bytes:
        """Return the block's offset in the file."""
        return (address - self._base).to_bytes(8, "little")

    def open(self, token: bytes, nbytes: int) -> int:
        """Return another rank's block; the whole file is mapped already."""
        begin = int.from_bytes(token, "little")
        if begin % ALIGN or rounded(nbytes) > self._memory.nbytes - begin:
            raise HandleError("the handle is of a block that is not in the pool")
        return self._base + begin

    def let_go(self, address: int) -> None:
        """The file stays mapped."""

    def array(self, address: int, nbytes: int, layout: ArrayLayout) -> tuple[Any, Any]:
        block = host_anchor(self._memory.buffer, rounded(nbytes), address - self._base)
        return host_array(block, layout), block

    def has(self, address: int) -> bool:
        """Whether an address is in the pool's mapping."""
        return self._base <= address < self._end

    def find(self, array: Any) -> tuple[int, int] | None:
        if not isinstance(array, np.ndarray):
            return None
        address = address_of(root_of(array))
        return address, address_of(array) - address

    def close(self) -> None:
        """Unmap; memory with live arrays is unmapped with the last of them."""
        self._end = self._base
        self._memory.close()
        del self._memory, self._region  # only arrays keep the mapping, not references to the pool

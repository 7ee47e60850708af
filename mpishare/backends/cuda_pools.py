"""Memory pools of the CUDA driver, which other processes import: one descriptor, many pointers.

A pool travels once, as a file descriptor; after that 64 bytes identify each pointer, and the second
and every further one is opened in about a microsecond, where a legacy handle takes hundreds.

Exporting a pointer takes the driver 70 us and more, importing one 3. So small blocks of mpishare's
own pools are cut from chunks, which are exported once, imported once, and stay until the pool is
closed.

Imported only where a GPU was found.
"""

from __future__ import annotations

import os
from bisect import bisect_right, insort
from functools import partial
from typing import TYPE_CHECKING, Any

import cupy
from cuda.bindings import driver as cuda

from mpishare.backends import driver
from mpishare.backends.cuda_memory import Anchor, cuda_array
from mpishare.backends.suballocator import ALIGN, FreeList, rounded
from mpishare.coordination.poll import poll
from mpishare.errors import CudaError, HandleError, format_nbytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.backends import Device
    from mpishare.memory.memory import ArrayLayout

CHUNK_NBYTES = 8 << 20
SMALL_NBYTES = CHUNK_NBYTES // 16
_POINTER_NBYTES = 64
_NON_BLOCKING = 1
_NO_TIMING = 2
_WAIT_S = 1.0
_PINNED = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED


_imported: dict[int, ImportedPool] = {}
"""By the driver's handle: a pool imported twice is one pool, and one destroy would end both."""


def create_pool(ordinal: int, where: str, *, max_nbytes: int = 0) -> Any:
    """Create an exportable pool on a GPU, of `max_nbytes` at most; 0: all that the GPU has."""
    props = cuda.CUmemPoolProps()
    props.allocType = _PINNED
    props.handleTypes = driver.POSIX_FD
    props.location = driver.location(ordinal)
    props.maxSize = max_nbytes
    return driver.call("cuMemPoolCreate", props, where=where)


def export_pool(pool: Any, where: str) -> int:
    """Return a file descriptor of a pool, for `import_pool` in other processes.

    The caller closes it; imported pools stay.
    """
    return int(
        driver.call("cuMemPoolExportToShareableHandle", pool, driver.POSIX_FD, 0, where=where)
    )


def export_pointer(address: int, where: str) -> bytes:
    """Return the 64 bytes that identify an allocation of an exportable pool."""
    return driver.handle_bytes(driver.call("cuMemPoolExportPointer", address, where=where))


def import_pool(fd: int, ordinal: int, where: str) -> ImportedPool:
    """Import a pool of another process, once for any number of calls; the caller closes `fd`.

    This rank's GPU `ordinal` gets access to the memory, also on another GPU.
    """
    pool = driver.call("cuMemPoolImportFromShareableHandle", fd, driver.POSIX_FD, 0, where=where)
    known = _imported.get(int(pool))
    if known is not None:
        known.users += 1
        return known
    try:
        location = driver.location(ordinal)
        if driver.call("cuMemPoolGetAccess", pool, location, where=where) != driver.READ_WRITE:
            access = driver.read_write_access(ordinal)
            driver.call("cuMemPoolSetAccess", pool, [access], 1, where=where)
    except BaseException:
        driver.call("cuMemPoolDestroy", pool, where=where)
        raise
    _imported[int(pool)] = ImportedPool(pool, where)
    return _imported[int(pool)]


def is_imported(address: int) -> bool:
    """Whether the allocation that begins at an address is one of another process, opened here."""
    return any(address in pool._opens for pool in _imported.values())


class ImportedPool:
    """A pool of another process, and its allocations that are open here.

    The driver maps an allocation once, for any number of imports, and one free ends it for all: so
    the opens of an address are counted.
    """

    def __init__(self, pool: Any, where: str) -> None:
        self._pool = pool
        self._where = where
        self._opens: dict[int, int] = {}
        self.users = 1

    def open(self, data: bytes) -> int:
        """Return the address here of an allocation, given its 64 bytes of `export_pointer`."""
        exported = driver.handle_of("CUmemPoolPtrExportData", data)
        address = int(
            driver.call("cuMemPoolImportPointer", self._pool, exported, where=self._where)
        )
        self._opens[address] = self._opens.get(address, 0) + 1
        return address

    def is_open(self, address: int) -> bool:
        return address in self._opens

    def close(self, address: int) -> None:
        """Undo one `open`; the last one unmaps, before the exporter may free the allocation.

        No work that uses it may be left on any stream.
        """
        self._opens[address] -= 1
        if not self._opens[address]:
            del self._opens[address]
            driver.call("cuMemFree", address, where=self._where)

    def destroy(self) -> None:
        """Undo one `import_pool`, once all of its allocations are closed."""
        self.users -= 1
        if not self.users:
            del _imported[int(self._pool)]
            driver.call("cuMemPoolDestroy", self._pool, where=self._where)


class _Chunks:
    """Small blocks on their owner, reused when the streams that used them are past them."""

    def __init__(
        self, allocate: Callable[[int], int], call: Callable[..., Any], where: str
    ) -> None:
        self._allocate = allocate
        self._call = call
        self._where = where
        self._begins: list[int] = []
        self._spans = FreeList(0)
        self._pending: list[tuple[Any, list[tuple[int, int]]]] = []
        self._events: list[Any] = []

    def allocate(self, nbytes: int) -> int | None:
        """Return a block; None if there is no room, nor soon will be."""
        size = rounded(nbytes)
        self._collect()
        begin = self._spans.allocate(size)
        if begin is None and self._add():
            begin = self._spans.allocate(size)
        while begin is None and self._pending:
            if not poll(partial(driver.is_event_done, self._pending[0][0], self._where), _WAIT_S):
                return None
            self._collect()
            begin = self._spans.allocate(size)
        return begin

    def free(self, blocks: Sequence[tuple[int, int]], stream: int) -> None:
        """Free blocks, once the work enqueued on a stream so far is done."""
        event = self._events.pop() if self._events else self._call("cuEventCreate", _NO_TIMING)
        self._call("cuEventRecord", event, stream)
        self._pending.append((event, [(begin, rounded(nbytes)) for begin, nbytes in blocks]))

    def find(self, address: int) -> int | None:
        """Return the begin of a block's chunk; None if it is in none."""
        index = bisect_right(self._begins, address) - 1
        if index >= 0 and address - self._begins[index] < CHUNK_NBYTES:
            return self._begins[index]
        return None

    def close(self) -> list[int]:
        """Return the begins of the chunks to be freed: no stream uses them any more."""
        for event in (*self._events, *(event for event, _ in self._pending)):
            self._call("cuEventDestroy", event)
        return self._begins

    def _add(self) -> bool:
        try:
            begin = self._allocate(CHUNK_NBYTES)
        except CudaError as error:
            if error.name != "CUDA_ERROR_OUT_OF_MEMORY":
                raise
            return False
        insort(self._begins, begin)
        # No block begins where its chunk does, and no two chunks are merged.
        self._spans.free(begin + ALIGN, CHUNK_NBYTES - ALIGN)
        return True

    def _collect(self) -> None:
        waiting = []
        for event, spans in self._pending:
            if driver.is_event_done(event, self._where):
                self._events.append(event)
                for begin, nbytes in spans:
                    self._spans.free(begin, nbytes)
            else:
                waiting.append((event, spans))
        self._pending = waiting


class _CudaPool:
    """The base of the owner's and the importers' side of a pool."""

    def __init__(self, device: Device, where: str) -> None:
        self._device = device
        self._where = where
        self._call = partial(driver.call, where=where)

    def array(self, address: int, nbytes: int, layout: ArrayLayout) -> tuple[Any, Any]:
        anchor = Anchor()
        return cuda_array(anchor, address, max(nbytes, 1), self._device.ordinal, layout), anchor


class OwnCudaPool(_CudaPool):
    """The memory of a pool on its owner; see `OwnMemory`."""

    def __init__(self, device: Device, where: str, max_nbytes: int) -> None:
        super().__init__(device, where)
        self._pool = create_pool(device.ordinal, where, max_nbytes=max_nbytes)
        # Chunks are for all streams: they are ordered on one that has nothing else to do.
        self._stream = self._call("cuStreamCreate", _NON_BLOCKING)
        self._chunks = _Chunks(self._allocate_chunk, self._call, where)
        self._pointers: dict[int, bytes] = {}  # of chunks

    def export(self) -> int:
        fd = export_pool(self._pool, self._where)
        os.set_inheritable(fd, False)
        return fd

    def allocate(self, nbytes: int, stream: int) -> int:
        if nbytes <= SMALL_NBYTES:
            address = self._chunks.allocate(nbytes)
            if address is not None:
                return address
        return self._allocate(nbytes, stream)

    def free(self, blocks: Sequence[tuple[int, int, int]]) -> None:
        small: dict[int, list[tuple[int, int]]] = {}
        for address, nbytes, stream in blocks:
            if self._chunks.find(address) is None:
                self._call("cuMemFreeAsync", address, stream)
            else:
                small.setdefault(stream, []).append((address, nbytes))
        for stream, group in small.items():
            self._chunks.free(group, stream)

    def publish(self, address: int) -> bytes:
        """Return the token of the driver's allocation, and the block's offset in it."""
        chunk = self._chunks.find(address)
        if chunk is None:
            return export_pointer(address, self._where) + bytes(8)
        if chunk not in self._pointers:
            self._pointers[chunk] = export_pointer(chunk, self._where)
        return self._pointers[chunk] + (address - chunk).to_bytes(8, "little")

    def find(self, array: Any) -> tuple[int, int] | None:
        if not isinstance(array, cupy.ndarray):
            return None
        address = int(array.data.mem.ptr)
        return address, int(array.data.ptr) - address

    def close(self) -> None:
        """Destroy the pool, once no rank holds a block."""
        for address in self._chunks.close():
            self._call("cuMemFreeAsync", address, self._stream)
        self._call("cuStreamSynchronize", self._stream)
        self._call("cuStreamDestroy", self._stream)
        self._call("cuMemPoolDestroy", self._pool)

    def _allocate_chunk(self, nbytes: int) -> int:
        address = self._allocate(nbytes, self._stream)
        self._call("cuStreamSynchronize", self._stream)
        return address

    def _allocate(self, nbytes: int, stream: Any) -> int:
        remedy = (
            f"{format_nbytes(nbytes)} were asked for: drop arrays of the pool on all ranks, make "
            "it with a larger max_nbytes, or free CuPy's pool "
            "(cupy.get_default_memory_pool().free_all_blocks())"
        )
        arguments = max(nbytes, 1), self._pool, stream
        return int(self._call("cuMemAllocFromPoolAsync", *arguments, remedy=remedy))


class PeerCudaPool(_CudaPool):
    """The memory of another rank's pool; see `PeerMemory`."""

    def __init__(self, fd: int, device: Device, where: str) -> None:
        super().__init__(device, where)
        self._pool = import_pool(fd, device.ordinal, where)
        self._chunks: dict[bytes, int] = {}

    def open(self, token: bytes, nbytes: int) -> int:
        """Return another rank's block, mapped."""
        data, offset = token[:_POINTER_NBYTES], int.from_bytes(token[_POINTER_NBYTES:], "little")
        if len(data) < _POINTER_NBYTES or (offset and offset + nbytes > CHUNK_NBYTES):
            raise HandleError("the handle is of a block that is not in the pool")
        if not offset:
            return self._pool.open(data)
        if data not in self._chunks:
            self._chunks[data] = self._pool.open(data)
        return self._chunks[data] + offset

    def let_go(self, address: int) -> None:
        """Undo one `open`, once no work that uses the block is left; chunks stay mapped."""
        if self._pool.is_open(address):
            self._pool.close(address)

    def close(self) -> None:
        """Drop the pool, once this rank holds no block."""
        while self._chunks:
            self._pool.close(self._chunks.popitem()[1])
        self._pool.destroy()

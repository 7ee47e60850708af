"""Memory pools of the CUDA driver that other processes import: one descriptor, many pointers.

A pool travels once, as a file descriptor; after that 64 bytes identify each pointer, and the second
and every further one is opened in about a microsecond, where a legacy handle takes hundreds.

Imported only where a GPU was found.
"""

from __future__ import annotations

import os
from typing import Any

from cuda.bindings import driver as cuda

from mpishare.backends import driver
from mpishare.errors import CudaError

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


def can_export(ordinal: int) -> bool:
    """Return whether a pool on a GPU can be made and exported, by trying."""
    try:
        pool = create_pool(ordinal, "")
    except CudaError:
        return False
    try:
        os.close(export_pool(pool, ""))
    except CudaError:
        return False
    finally:
        driver.call("cuMemPoolDestroy", pool)
    return True


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

"""Physical chunks of GPU memory, mapped consecutively: torch's expandable segments."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from mpishare.backends import driver

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Chunk(NamedTuple):
    """A file descriptor of one chunk, which the receiver closes, and its size in bytes."""

    fd: int
    nbytes: int


def export_chunks(address: int, nbytes: int, where: str) -> tuple[int, list[Chunk]]:
    """Return the begin of the first chunk around a range, and the chunks, or raise `CudaError`."""
    chunks: list[Chunk] = []
    start = at = driver.mapping(address)[0]
    call = partial(driver.call, where=where)
    try:
        while at < address + nbytes:
            at, size = driver.mapping(at)
            handle = call("cuMemRetainAllocationHandle", at)
            try:
                fd = int(call("cuMemExportToShareableHandle", handle, driver.POSIX_FD, 0))
            finally:
                call("cuMemRelease", handle)
            chunks.append(Chunk(fd, size))
            at += size
    except BaseException:
        for chunk in chunks:
            os.close(chunk.fd)
        raise
    return start, chunks


def import_chunks(
    chunks: Sequence[Chunk], ordinal: int, where: str
) -> tuple[int, Callable[[], Any]]:
    """Map chunks of another process consecutively; return the address and their unmapping.

    The caller closes the descriptors.
    """
    call = partial(driver.call, where=where)
    total = sum(chunk.nbytes for chunk in chunks)
    address = int(call("cuMemAddressReserve", total, 0, 0, 0))
    end = address  # of the mapped chunks

    def unmap() -> None:
        at = address
        for chunk in chunks:
            if at < end:
                call("cuMemUnmap", at, chunk.nbytes)
                at += chunk.nbytes
        call("cuMemAddressFree", address, total)

    try:
        for chunk in chunks:
            handle = call("cuMemImportFromShareableHandle", chunk.fd, driver.POSIX_FD)
            try:
                call("cuMemMap", end, chunk.nbytes, 0, handle, 0)
            finally:
                call("cuMemRelease", handle)  # the mapping holds it
            end += chunk.nbytes
        call("cuMemSetAccess", address, total, [driver.read_write_access(ordinal)], 1)
    except BaseException:
        unmap()
        raise
    return address, unmap

"""GPU memory that exists already: exported to other ranks, and mapped there.

A legacy handle opens a whole block; a pool travels as one descriptor, mapped chunks as one each:
see `mpishare.memory.kinds`. Each is opened once, for any number of windows.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from mpishare.backends import Exported, InPlace, cuda_pools, driver
from mpishare.backends.cuda_memory import (
    CudaMemory,
    GivenMemory,
    legacy_handle,
    open_legacy_handle,
)
from mpishare.memory.fd_client import fetch_fd
from mpishare.memory.kinds import FREED, HOST_ON_CUDA, MAPPED, Kind, Refusal, classify

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.backends.cuda_memory import Mappings
    from mpishare.memory.fd_server import FdServer
    from mpishare.memory.handle import Handle
    from mpishare.memory.kinds import PointerAttributes
    from mpishare.memory.memory import Memory

T = TypeVar("T")


class _Shared(Generic[T]):
    """Things that several windows use, by key: opened for the first, closed by the last."""

    def __init__(self) -> None:
        self._open: dict[Any, tuple[T, Callable[[], Any]]] = {}
        self._users: dict[Any, int] = {}

    def use(self, key: Any, open_it: Callable[[], tuple[T, Callable[[], Any]]]) -> T:
        """Return a thing, for one more user; `open_it` returns it and its close."""
        if key not in self._open:
            self._open[key] = open_it()
            self._users[key] = 0
        self._users[key] += 1
        return self._open[key][0]

    def leave(self, key: Any) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self._open.pop(key)[1]()


class _Offer(NamedTuple):
    """An allocation for other ranks: its token, its begin and bytes, and how to undo the offer."""

    token: str
    start: int
    capacity: int
    free: Callable[[], Any] = lambda: None  # once the window is closed
    retract: Callable[[], None] = lambda: None  # once every rank has tried to open it


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


class CudaInPlace(InPlace):
    """Memory that exists already on the GPU of this rank, and that of other ranks."""

    def __init__(
        self,
        ordinal: int,
        where: str,
        mappings: Mappings,
        fd_server: FdServer,
        timeout_s: float,
    ) -> None:
        self._ordinal = ordinal
        self._where = where
        self._mappings = mappings
        self._fd_server = fd_server
        self._timeout_s = timeout_s
        self._given_pools = _Shared[str]()  # tokens
        self._open_blocks = _Shared[int]()  # addresses
        self._open_pools = _Shared[cuda_pools.ImportedPool]()

    def is_alive(self, address: int) -> bool:
        """Whether the driver has memory at an address."""
        return driver.pointer_attributes(address) is not None

    # --- export

    def export(
        self, source: Any, address: int, nbytes: int, *, is_host: bool
    ) -> Exported | Refusal:
        found = driver.pointer_attributes(address)
        if found is None:
            return HOST_ON_CUDA if is_host else FREED
        if self._mappings.has(address) or cuda_pools.is_imported(found.start):
            return MAPPED
        kind = classify(found, self._ordinal)
        if isinstance(kind, Refusal):
            return kind
        make_offer, _ = _WAYS[kind]
        offer: _Offer = make_offer(self, found, address, nbytes)
        memory = GivenMemory(self._ordinal, address, nbytes, offer.free, source)
        offset = address - offer.start
        return Exported(memory, kind, offer.token, offset, offer.capacity, offer.retract)

    def _offer_block(self, found: PointerAttributes, _address: int, _nbytes: int) -> _Offer:
        # With the number of the block: another one may come to lie at the same address.
        token = f"{found.buffer_id}:{legacy_handle(found.start, self._where)}"
        return _Offer(token, found.start, found.nbytes)

    def _offer_pool(self, found: PointerAttributes, _address: int, _nbytes: int) -> _Offer:
        # First the pool: the driver exports no pointer of one that was not exported.
        token = self._given_pools.use(found.pool, partial(self._offer_pool_fd, found.pool))
        free = partial(self._given_pools.leave, found.pool)
        try:
            data = cuda_pools.export_pointer(found.start, self._where)
        except BaseException:
            free()
            raise
        return _Offer(f"{token}:{data.hex()}", found.start, found.nbytes, free)

    def _offer_pool_fd(self, pool: int) -> tuple[str, Callable[[], None]]:
        fd = cuda_pools.export_pool(pool, self._where)
        token = self._fd_server.offer_fd(fd)
        return token, partial(self._withdraw, [(token, fd)])

    def _offer_chunks(self, _found: PointerAttributes, address: int, nbytes: int) -> _Offer:
        start, chunks = export_chunks(address, nbytes, self._where)
        lent = [(self._fd_server.offer_fd(chunk.fd), chunk.fd) for chunk in chunks]
        pairs = zip(lent, chunks, strict=True)
        token = ",".join(f"{token}:{chunk.nbytes}" for (token, _), chunk in pairs)
        capacity = sum(chunk.nbytes for chunk in chunks)
        return _Offer(token, start, capacity, retract=partial(self._withdraw, lent))

    def _withdraw(self, lent: list[tuple[str, int]]) -> None:
        while lent:
            token, fd = lent.pop()
            self._fd_server.withdraw(token)
            os.close(fd)

    # --- import

    def open(self, handle: Handle, rank: int) -> Memory:
        if handle.kind not in _WAYS:
            return super().open(handle, rank)
        _, map_it = _WAYS[handle.kind]
        address, close = map_it(self, handle, rank)
        unmap = self._mappings.add(address, handle.capacity, close)
        return CudaMemory(self._ordinal, address + handle.offset, handle.nbytes, unmap)

    def _map_block(self, handle: Handle, _rank: int) -> tuple[int, Callable[[], None]]:
        def open_it() -> tuple[int, Callable[[], Any]]:
            token = handle.token.partition(":")[2]
            address = open_legacy_handle(token, handle.uuid, self._where)
            return address, partial(driver.call, "cuIpcCloseMemHandle", address, where=self._where)

        key = f"{handle.nonce}:{handle.token}"
        return self._open_blocks.use(key, open_it), partial(self._open_blocks.leave, key)

    def _map_pointer(self, handle: Handle, rank: int) -> tuple[int, Callable[[], None]]:
        token, _, data = handle.token.partition(":")
        key = f"{handle.nonce}:{token}"
        pool = self._open_pools.use(key, partial(self._import_pool, rank, token))
        try:
            address = pool.open(bytes.fromhex(data))
        except BaseException:
            self._open_pools.leave(key)
            raise

        def close() -> None:
            pool.close(address)
            self._open_pools.leave(key)

        return address, close

    def _import_pool(
        self, rank: int, token: str
    ) -> tuple[cuda_pools.ImportedPool, Callable[[], None]]:
        fd = fetch_fd(rank, token, self._timeout_s)
        try:
            pool = cuda_pools.import_pool(fd, self._ordinal, self._where)
        finally:
            os.close(fd)
        return pool, pool.destroy

    def _map_chunks(self, handle: Handle, rank: int) -> tuple[int, Callable[[], None]]:
        chunks: list[Chunk] = []
        try:
            for text in handle.token.split(","):
                token, _, nbytes = text.partition(":")
                fd = fetch_fd(rank, token, self._timeout_s)
                chunks.append(Chunk(fd, int(nbytes)))
            return import_chunks(chunks, self._ordinal, self._where)
        finally:
            for chunk in chunks:
                os.close(chunk.fd)


# How memory of a kind is offered, and how its receiver maps it.
_WAYS: dict[str, Any] = {
    Kind.BLOCK: (CudaInPlace._offer_block, CudaInPlace._map_block),
    Kind.POOL: (CudaInPlace._offer_pool, CudaInPlace._map_pointer),
    Kind.CHUNKS: (CudaInPlace._offer_chunks, CudaInPlace._map_chunks),
}

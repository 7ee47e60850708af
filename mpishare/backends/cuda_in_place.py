"""GPU memory that exists already: exported to other ranks, and mapped there.

A legacy handle opens a whole block; a pool travels as one descriptor, mapped chunks as one each:
see `mpishare.memory.kinds`. Each is opened once, for any number of windows.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from mpishare.backends import Exported, InPlace, cuda_chunks, cuda_pools, driver
from mpishare.backends.cuda_chunks import Chunk
from mpishare.backends.cuda_memory import (
    CudaMemory,
    GivenMemory,
    legacy_handle,
    open_legacy_handle,
)
from mpishare.errors import HandleError
from mpishare.memory.kinds import FREED, HOST_ON_CUDA, MAPPED, Kind, Refusal, classify

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.backends import Memory
    from mpishare.backends.cuda_memory import Mappings
    from mpishare.backends.cuda_pools import ImportedPool
    from mpishare.memory.descriptors import Descriptors
    from mpishare.memory.handle import Handle
    from mpishare.memory.kinds import PointerAttributes


@dataclass
class _Counted:
    """A mapping opened once for several windows; the last to leave closes it."""

    close: Callable[[], Any]
    users: int = 0


@dataclass
class _OpenBlock(_Counted):
    address: int = 0


@dataclass
class _GivenPool(_Counted):
    token: str = ""


@dataclass
class _OpenPool(_Counted):
    pool: ImportedPool = field(kw_only=True)


class CudaInPlace(InPlace):
    """Memory that exists already on the GPU of this rank, and that of other ranks."""

    def __init__(
        self,
        ordinal: int,
        where: str,
        mappings: Mappings,
        descriptors: Descriptors,
        timeout_s: float,
    ) -> None:
        self._ordinal = ordinal
        self._where = where
        self._mappings = mappings
        self._descriptors = descriptors
        self._timeout_s = timeout_s
        self._given_pools: dict[int, _GivenPool] = {}
        self._open_blocks: dict[str, _OpenBlock] = {}
        self._open_pools: dict[str, _OpenPool] = {}

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
        give = {Kind.BLOCK: self._give_block, Kind.POOL: self._give_pool}
        return give.get(kind, self._give_chunks)(found, source, address, nbytes)

    def _give_block(
        self, found: PointerAttributes, source: Any, address: int, nbytes: int
    ) -> Exported:
        handle = legacy_handle(found.start, self._where)
        memory = GivenMemory(self._ordinal, address, nbytes, lambda: None, source)
        # With the number of the block: another one may come to lie at the same address.
        token = f"{found.buffer_id}:{handle}"
        return Exported(memory, Kind.BLOCK, token, address - found.start, found.nbytes)

    def _give_pool(
        self, found: PointerAttributes, source: Any, address: int, nbytes: int
    ) -> Exported:
        pool = self._given_pools.get(found.pool)
        if pool is None:  # the driver exports no pointer of a pool that was not exported
            pool = self._given_pools[found.pool] = self._lend_pool(found.pool)
        pool.users += 1
        free = partial(_leave, self._given_pools, found.pool)
        try:
            data = cuda_pools.export_pointer(found.start, self._where)
        except BaseException:
            free()
            raise
        memory = GivenMemory(self._ordinal, address, nbytes, free, source)
        token = f"{pool.token}:{data.hex()}"
        return Exported(memory, Kind.POOL, token, address - found.start, found.nbytes)

    def _lend_pool(self, pool: int) -> _GivenPool:
        fd = cuda_pools.export_pool(pool, self._where)
        token = self._descriptors.lend(fd)
        return _GivenPool(partial(self._take_back, [(token, fd)]), token=token)

    def _give_chunks(
        self, _found: PointerAttributes, source: Any, address: int, nbytes: int
    ) -> Exported:
        start, chunks = cuda_chunks.export_chunks(address, nbytes, self._where)
        lent = [(self._descriptors.lend(chunk.fd), chunk.fd) for chunk in chunks]
        pairs = zip(lent, chunks, strict=True)
        token = ",".join(f"{token}:{chunk.nbytes}" for (token, _), chunk in pairs)
        return Exported(
            GivenMemory(self._ordinal, address, nbytes, lambda: None, source),
            Kind.CHUNKS,
            token,
            address - start,
            sum(chunk.nbytes for chunk in chunks),
            partial(self._take_back, lent),
        )

    def _take_back(self, lent: list[tuple[str, int]]) -> None:
        while lent:
            token, fd = lent.pop()
            self._descriptors.take_back(token)
            os.close(fd)

    # --- import

    def open(self, handle: Handle, rank: int) -> Memory:
        if handle.kind == Kind.BLOCK:
            address, close = self._open_block(handle)
        elif handle.kind == Kind.POOL:
            address, close = self._open_pointer(handle, rank)
        elif handle.kind == Kind.CHUNKS:
            address, close = self._map_chunks(handle, rank)
        else:
            raise HandleError(f"a handle of kind {handle.kind!r} was received, which is unknown")
        unmap = self._mappings.add(address, handle.capacity, close)
        return CudaMemory(self._ordinal, address + handle.offset, handle.nbytes, unmap)

    def _open_block(self, handle: Handle) -> tuple[int, Callable[[], None]]:
        key = f"{handle.nonce}:{handle.token}"
        block = self._open_blocks.get(key)
        if block is None:
            token = handle.token.partition(":")[2]
            address = open_legacy_handle(token, handle.uuid, self._where)
            close = partial(driver.call, "cuIpcCloseMemHandle", address, where=self._where)
            block = self._open_blocks[key] = _OpenBlock(close, address=address)
        block.users += 1
        return block.address, partial(_leave, self._open_blocks, key)

    def _open_pointer(self, handle: Handle, rank: int) -> tuple[int, Callable[[], None]]:
        token, _, data = handle.token.partition(":")
        key = f"{handle.nonce}:{token}"
        known = self._open_pools.get(key)
        if known is None:
            fd = self._descriptors.borrow(rank, token, self._timeout_s)
            try:
                pool = cuda_pools.import_pool(fd, self._ordinal, self._where)
            finally:
                os.close(fd)
            known = self._open_pools[key] = _OpenPool(pool.destroy, pool=pool)
        known.users += 1
        pool = known.pool
        try:
            address = pool.open(bytes.fromhex(data))
        except BaseException:
            _leave(self._open_pools, key)
            raise

        def close() -> None:
            pool.close(address)
            _leave(self._open_pools, key)

        return address, close

    def _map_chunks(self, handle: Handle, rank: int) -> tuple[int, Callable[[], None]]:
        chunks: list[Chunk] = []
        try:
            for text in handle.token.split(","):
                token, _, nbytes = text.partition(":")
                fd = self._descriptors.borrow(rank, token, self._timeout_s)
                chunks.append(Chunk(fd, int(nbytes)))
            return cuda_chunks.import_chunks(chunks, self._ordinal, self._where)
        finally:
            for chunk in chunks:
                os.close(chunk.fd)


def _leave(opened: dict[Any, Any], key: Any) -> None:
    """Count one user less; the last one closes it."""
    counted = opened[key]
    counted.users -= 1
    if not counted.users:
        del opened[key]
        counted.close()

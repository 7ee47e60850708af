"""Suballocator of device memory: small blocks are parts of chunks that other ranks open once.

To open a rank's memory takes a fraction of a millisecond, and several for the first between two
GPUs. So small blocks are parts of chunks, which stay allocated and open until the node closes. A
large block is an allocation of its own, freed when it is closed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.backends import Backend, Memory
    from mpishare.memory.handle import Handle

    PackHandle = Callable[[str, int, int, int], str]
    """Returns the packed handle of (token, offset, nbytes, bytes of the whole allocation)."""

CHUNK_NBYTES = 2 << 20
SMALL_NBYTES = CHUNK_NBYTES // 4
ALIGN = 256


@dataclass(frozen=True)
class Suballocation:
    """A block of an allocation.

    Attributes
    ----------
    memory : Memory
        The allocation.
    offset, nbytes : int, bytes
        The block's offset in it, and its size.
    close : callable
        Frees or unmaps the block. Call it once; the block may be reused at once, so no other rank
        may use it any more.
    """

    memory: Memory
    offset: int
    nbytes: int
    close: Callable[[], Any]

    @property
    def address(self) -> int:
        """Where the block is mapped in this process."""
        return self.memory.address + self.offset

    def zero(self) -> None:
        """Set all bytes to 0, on the current stream."""
        self.memory.array((self.offset + self.nbytes,), "u1")[self.offset :] = 0


class FreeList:
    """The free spans of a chunk, allocated first-fit and merged when freed. Pure integers."""

    def __init__(self, nbytes: int) -> None:
        self._free = [(0, nbytes)]

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of the first free span that is large enough, which is now in use."""
        for index, (begin, end) in enumerate(self._free):
            if end - begin >= nbytes:
                self._free[index : index + 1] = [(begin + nbytes, end)] * (end - begin > nbytes)
                return begin
        return None

    def free(self, begin: int, nbytes: int) -> None:
        """Free a span that was allocated."""
        free: list[tuple[int, int]] = []
        for span in sorted([*self._free, (begin, begin + nbytes)]):
            if free and free[-1][1] == span[0]:
                free[-1] = free[-1][0], span[1]
            else:
                free.append(span)
        self._free = free


@dataclass(frozen=True)
class _Chunk:
    memory: Memory
    token: str
    spans: FreeList


class Suballocator:
    """The chunks of this rank, and those of other ranks that it has opened. Methods are local."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._chunks: list[_Chunk] = []
        self._opened: dict[str, Memory] = {}

    def allocate(self, nbytes: int, pack: PackHandle) -> tuple[Suballocation, str]:
        """Return a block and its packed handle."""
        if nbytes > SMALL_NBYTES:
            memory = self._backend.allocate(nbytes)
            block = Suballocation(memory, 0, nbytes, memory.close)
            return block, pack(self._backend.publish(memory), 0, nbytes, memory.nbytes)
        rounded = -(-nbytes // ALIGN) * ALIGN
        while True:
            for chunk in self._chunks:
                begin = chunk.spans.allocate(rounded)
                if begin is not None:
                    free = partial(chunk.spans.free, begin, rounded)
                    block = Suballocation(chunk.memory, begin, nbytes, free)
                    return block, pack(chunk.token, begin, nbytes, chunk.memory.nbytes)
            memory = self._backend.allocate(CHUNK_NBYTES)
            chunk = _Chunk(memory, self._backend.publish(memory), FreeList(memory.nbytes))
            self._chunks.append(chunk)

    def open(self, handle: Handle) -> Suballocation:
        """Map a block of another rank."""
        token, capacity = handle.token, handle.capacity
        if handle.nbytes > SMALL_NBYTES:
            memory = self._backend.open(token, capacity, handle.uuid)
            return Suballocation(memory, handle.offset, handle.nbytes, memory.close)
        if token not in self._opened:
            self._opened[token] = self._backend.open(token, capacity, handle.uuid)
        return Suballocation(self._opened[token], handle.offset, handle.nbytes, lambda: None)

    def release(self) -> None:
        """Unmap what other ranks own."""
        while self._opened:
            self._opened.popitem()[1].close()

    def close(self) -> None:
        """Free the chunks, once all other ranks have released them."""
        while self._chunks:
            self._chunks.pop().memory.close()

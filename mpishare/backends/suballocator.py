"""Suballocator of device memory: small blocks are parts of chunks that other ranks open once.

Opening a rank's memory takes a fraction of a millisecond, and several for the first between two
GPUs. So small blocks are parts of chunks, which stay allocated and open until the node closes. A
large block is an allocation of its own, freed when it is closed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.backends import Backend
    from mpishare.memory.handle import Handle
    from mpishare.memory.memory import Memory

CHUNK_NBYTES = 2 << 20
SMALL_NBYTES = CHUNK_NBYTES // 4
ALIGN = 256


def rounded(nbytes: int) -> int:
    """Return the bytes of a block for that many."""
    return -(-max(nbytes, 1) // ALIGN) * ALIGN


class Suballocation(NamedTuple):
    """A block of an allocation, whose handle has the token of that."""

    memory: Memory  # the allocation
    offset: int
    nbytes: int
    # Once only, when no rank uses the block any more: it may be reused at once.
    close: Callable[[], Any]
    token: str

    @property
    def address(self) -> int:
        return self.memory.address + self.offset


class FreeList:
    """The free spans of a chunk, allocated best-fit and merged when freed. Pure integers.

    Each call visits one span of one size and its two neighbors, so that a hundred thousand spans
    cost as little as ten: only the sorted list of distinct sizes grows with them.
    """

    def __init__(self, nbytes: int) -> None:
        self._end_of: dict[int, int] = {}  # of the free span that begins here
        self._begin_of: dict[int, int] = {}  # of the free span that ends here
        self._of_size: dict[int, dict[int, None]] = {}  # where the free spans of a size begin
        self._sizes: list[int] = []  # sorted
        if nbytes:
            self._add(0, nbytes)

    @property
    def largest(self) -> int:
        """The size of the largest free span; 0 if there is none."""
        return self._sizes[-1] if self._sizes else 0

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of a smallest free span that is large enough; it is now in use."""
        index = bisect_left(self._sizes, nbytes)
        if index == len(self._sizes):
            return None
        size = self._sizes[index]
        # The last one freed, whose bytes may still be in a cache.
        begin, _ = self._of_size[size].popitem()
        self._forget(begin, begin + size)
        if size > nbytes:
            self._add(begin + nbytes, begin + size)
        return begin

    def free(self, begin: int, nbytes: int) -> None:
        """Free a span that was allocated, or add one."""
        end = begin + nbytes
        if end in self._end_of:
            after = self._end_of[end]
            self._remove(end, after)
            end = after
        if begin in self._begin_of:
            before = self._begin_of[begin]
            self._remove(before, begin)
            begin = before
        self._add(begin, end)

    def _add(self, begin: int, end: int) -> None:
        size = end - begin
        self._end_of[begin] = end
        self._begin_of[end] = begin
        if size not in self._of_size:
            self._of_size[size] = {}
            insort(self._sizes, size)
        self._of_size[size][begin] = None

    def _remove(self, begin: int, end: int) -> None:
        del self._of_size[end - begin][begin]
        self._forget(begin, end)

    def _forget(self, begin: int, end: int) -> None:
        size = end - begin
        del self._end_of[begin]
        del self._begin_of[end]
        if not self._of_size[size]:
            del self._of_size[size]
            del self._sizes[bisect_left(self._sizes, size)]


class _Chunk(NamedTuple):
    memory: Memory
    token: str
    spans: FreeList


class Suballocator:
    """The chunks of this rank, and those of other ranks that it has opened."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._chunks: list[_Chunk] = []
        self._opened: dict[str, Memory] = {}

    def adopt(self, memory: Memory, token: str) -> None:
        """Add a chunk that this rank allocated for another purpose, and needs no more."""
        self._chunks.append(_Chunk(memory, token, FreeList(memory.nbytes)))

    def adopt_opened(self, memory: Memory, token: str) -> None:
        """Add another rank's chunk, which this one has mapped."""
        self._opened[token] = memory

    def allocate(self, nbytes: int) -> Suballocation:
        if nbytes > SMALL_NBYTES:
            memory = self._backend.allocate(nbytes)
            return Suballocation(memory, 0, nbytes, memory.close, self._backend.publish(memory))
        size = rounded(nbytes)
        while True:
            for chunk in self._chunks:
                begin = chunk.spans.allocate(size)
                if begin is not None:
                    free = partial(chunk.spans.free, begin, size)
                    return Suballocation(chunk.memory, begin, nbytes, free, chunk.token)
            memory = self._backend.allocate(CHUNK_NBYTES)
            self.adopt(memory, self._backend.publish(memory))

    def open(self, handle: Handle) -> Suballocation:
        """Map a block of another rank."""
        token, capacity = handle.token, handle.capacity
        if handle.nbytes > SMALL_NBYTES:
            memory = self._backend.open(token, capacity, handle.uuid)
            return Suballocation(memory, handle.offset, handle.nbytes, memory.close, token)
        if token not in self._opened:
            self._opened[token] = self._backend.open(token, capacity, handle.uuid)
        return Suballocation(self._opened[token], handle.offset, handle.nbytes, int, token)

    def release(self) -> None:
        """Unmap memory of other ranks."""
        while self._opened:
            self._opened.popitem()[1].close()

    def close(self) -> None:
        """Free the chunks, once all other ranks have released them."""
        while self._chunks:
            self._chunks.pop().memory.close()

"""Small pieces of device memory, cut from chunks that other ranks open once.

To open a rank's memory takes a fraction of a millisecond, and of the first that is open between two
GPUs several. So what is small is cut from a chunk, and chunks stay, opened too, until the node
closes. What is larger is an allocation of its own, which goes when it is closed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.backends import Backend, Memory
    from mpishare.memory.handle import Handle

    Sign = Callable[[str, int, int, int], str]
    """Returns the packed handle of a token, an offset, bytes and the bytes of all."""

CHUNK_NBYTES = 2 << 20
SMALL_NBYTES = CHUNK_NBYTES // 4
ALIGN = 256


@dataclass(frozen=True)
class Suballocation:
    """Some bytes of an allocation.

    Attributes
    ----------
    memory : Memory
        The allocation.
    offset, nbytes : int, bytes
        Where the piece begins in it, and its own.
    close : callable
        Gives it back, or unmaps it. Once; a chunk may be written by others until all have let go.
    """

    memory: Memory
    offset: int
    nbytes: int
    close: Callable[[], Any]

    @property
    def address(self) -> int:
        """Where this process sees it."""
        return self.memory.address + self.offset

    def zero(self) -> None:
        """Set all bytes to 0, on the current stream."""
        self.memory.array((self.offset + self.nbytes,), "u1")[self.offset :] = 0


class FreeList:
    """Which bytes of a chunk are free. Pure integers."""

    def __init__(self, nbytes: int) -> None:
        self._free = [(0, nbytes)]

    def take(self, nbytes: int) -> int | None:
        """Return where so many bytes are free, the first such place; they are taken."""
        for index, (begin, end) in enumerate(self._free):
            if end - begin >= nbytes:
                self._free[index : index + 1] = [(begin + nbytes, end)] * (end - begin > nbytes)
                return begin
        return None

    def give(self, begin: int, nbytes: int) -> None:
        """Take bytes back that were taken."""
        free: list[tuple[int, int]] = []
        for span in sorted([*self._free, (begin, begin + nbytes)]):
            if free and free[-1][1] == span[0]:
                free[-1] = free[-1][0], span[1]
            else:
                free.append(span)
        self._free = free


class Suballocator:
    """The chunks of this rank, and those of others that it has opened. All methods are local."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._chunks: list[tuple[Memory, str, FreeList]] = []
        self._opened: dict[str, Memory] = {}

    def cut(self, nbytes: int, sign: Sign) -> tuple[Suballocation, str]:
        """Return bytes that nobody uses, and their packed handle."""
        if nbytes > SMALL_NBYTES:
            memory = self._backend.allocate(nbytes)
            piece = Suballocation(memory, 0, nbytes, memory.close)
            return piece, sign(self._backend.publish(memory), 0, nbytes, memory.nbytes)
        taken = -(-nbytes // ALIGN) * ALIGN
        while True:
            for memory, token, room in self._chunks:
                begin = room.take(taken)
                if begin is not None:
                    piece = Suballocation(memory, begin, nbytes, partial(room.give, begin, taken))
                    return piece, sign(token, begin, nbytes, memory.nbytes)
            memory = self._backend.allocate(CHUNK_NBYTES)
            self._chunks.append((memory, self._backend.publish(memory), FreeList(memory.nbytes)))

    def open(self, handle: Handle) -> Suballocation:
        """Return what another rank has cut."""
        token, capacity = handle.token, handle.capacity
        if handle.nbytes > SMALL_NBYTES:
            memory = self._backend.open(token, capacity, handle.uuid)
            return Suballocation(memory, handle.offset, handle.nbytes, memory.close)
        if token not in self._opened:
            self._opened[token] = self._backend.open(token, capacity, handle.uuid)
        return Suballocation(self._opened[token], handle.offset, handle.nbytes, lambda: None)

    def release(self) -> None:
        """Unmap what others own."""
        while self._opened:
            self._opened.popitem()[1].close()

    def close(self) -> None:
        """Free the chunks, once all others have released."""
        while self._chunks:
            self._chunks.pop()[0].close()

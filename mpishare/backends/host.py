"""The host backend: NumPy arrays in shared memory. Calls block, so there are no streams."""

from __future__ import annotations

import json
import os
import weakref
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from mpishare.backends import Backend, Exported, InPlace
from mpishare.backends.host_pool import HostPool
from mpishare.memory import mapped, shared
from mpishare.memory.fd_client import fetch_fd
from mpishare.memory.kinds import UNNAMED, Kind, Refusal
from mpishare.memory.mapped import FilePart
from mpishare.memory.memory import Memory, host_anchor, host_array
from mpishare.memory.shared import SharedMemory

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.memory.fd_server import FdServer
    from mpishare.memory.handle import Handle
    from mpishare.memory.memory import ArrayLayout


class HostMemory(Memory):
    """Shared host memory as one rank maps it, from `start` on; a part of it has a size and `free`.

    `free` is called when the part is closed, and may unmap the whole.
    """

    def __init__(
        self,
        memory: SharedMemory,
        start: int = 0,
        nbytes: int | None = None,
        free: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(
            memory.address + start, memory.nbytes - start if nbytes is None else nbytes
        )
        self._memory: SharedMemory | None = memory
        self._start, self._free = start, free

    def close(self) -> bool:
        """Unmap; memory with live arrays is unmapped with the last of them."""
        self._release()
        return True

    def part(self, offset: int, nbytes: int, free: Callable[[], object]) -> Memory:
        return HostMemory(self.whole(), self._start + offset, nbytes, free)

    def protect(self, *, is_own: bool) -> None:
        super().protect(is_own=is_own)
        if not is_own:
            self.whole().protect()

    def whole(self) -> SharedMemory:
        """Return the whole memory that this is a part of, or this one."""
        if self._memory is None:
            raise ValueError("the memory is closed")
        return self._memory

    def _new_anchor(self) -> Any:
        buffer = self.whole().buffer
        # NumPy makes no array on a read-only buffer writable again.
        shown = buffer.toreadonly() if self.is_readonly else buffer
        return host_anchor(shown, self.nbytes, self._start)

    def _array(self, anchor: Any, layout: ArrayLayout) -> Any:
        return host_array(anchor, layout)

    def _release(self) -> None:
        if self._memory is not None:
            memory, self._memory = self._memory, None
            (self._free or memory.close)()


class HostBlock(HostMemory):
    """A block that is reused: it cannot be closed while arrays on it are alive."""

    close = Memory.close


class HostBackend(Backend):
    """Memory in /dev/shm. Calls block until the host has seen the counters: no streams."""

    name = "host"
    xp = np
    #: Memory of all nodes of this process that is cut into blocks, which travel one by one.
    cut: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    def __init__(self) -> None:
        self._published: dict[str, SharedMemory] = {}

    def allocate(self, nbytes: int) -> HostMemory:
        return HostMemory(shared.create(nbytes))

    def publish(self, memory: Memory) -> str:
        if not isinstance(memory, HostMemory):
            raise TypeError(f"{memory!r} is not memory of the host backend")
        whole = memory.whole()
        token = shared.publish(whole)
        self._published[token] = whole
        return token

    def open(self, token: str, nbytes: int, uuid: str) -> HostMemory:  # noqa: ARG002  no GPU
        memory = shared.attach(token, nbytes)
        memory.close_file()
        return HostMemory(memory)

    def descriptor(self, token: str) -> int:
        return shared.open_file(token, os.O_RDONLY)

    def retract(self, token: str) -> None:
        memory = self._published.pop(token)
        shared.forget(token)
        memory.close_file()  # the mapping does not need it

    def in_place(self, fd_server: FdServer, timeout_s: float) -> HostInPlace:
        return HostInPlace(self.cut, fd_server, timeout_s)

    def create_pool(self, max_nbytes: int) -> HostPool:
        memory = shared.create(max_nbytes or shared.free_nbytes(), is_sparse=True)
        return self._pool_in(memory, max_nbytes)

    def import_pool(self, fd: int) -> HostPool:
        memory = SharedMemory(os.dup(fd), os.fstat(fd).st_size)
        memory.close_file()
        return self._pool_in(memory)

    def _pool_in(self, memory: SharedMemory, max_nbytes: int = 0) -> HostPool:
        pool = HostPool(memory, max_nbytes)
        self.cut.add(pool)
        return pool


class HostFile(NamedTuple):
    """The token of memory of the kind `FILE`."""

    lent: str  # by which other ranks borrow the descriptor; empty where there is none
    path: str  # by which another process of this user opens it, while the memory is not closed
    is_writable: bool
    file: str  # device, inode and name


class _Bytes:
    """Bytes at an address for NumPy, whose arrays keep `source` alive."""

    def __init__(self, source: Any, address: int, nbytes: int, *, is_writable: bool) -> None:
        self._source = source
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (nbytes,),
            "data": (address, not is_writable),
        }


class GivenHostMemory(HostMemory):
    """The user's own memory, shared in place: its file is open until it is closed."""

    is_given = True

    def __init__(self, source: Any, address: int, nbytes: int, fd: int | None) -> None:
        Memory.__init__(self, address, nbytes)
        is_writable = source.flags.writeable
        self._bytes: Any = _Bytes(source, address, nbytes, is_writable=is_writable)
        self._fd = fd

    def _hold(self) -> Any:
        return np.asarray(self._bytes)  # held by its arrays: it can be closed before them

    def _release(self) -> None:
        self._bytes = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class HostInPlace(InPlace):
    """Memory of files that this process has mapped already: of other libraries, of the user."""

    def __init__(self, cut: weakref.WeakSet[Any], fd_server: FdServer, timeout_s: float) -> None:
        self._cut = cut
        self._fd_server = fd_server
        self._timeout_s = timeout_s

    def export(
        self,
        source: Any,
        address: int,
        nbytes: int,
        *,
        is_host: bool,  # noqa: ARG002  all is
    ) -> Exported | Refusal:
        for each in self._cut:
            if each.has(address):
                refusal: Refusal = each.refusal
                return refusal
        is_writable = source.flags.writeable
        part = mapped.find(address, nbytes, is_writable=is_writable)
        if isinstance(part, Refusal):
            return part
        fd = mapped.open_again(part, nbytes, is_writable=is_writable)
        memory = GivenHostMemory(source, address, nbytes, fd)
        path = "" if fd is None else shared.path_of(fd)
        try:
            lent = [] if fd is None else [self._fd_server.offer_fd(fd)]
        except BaseException:
            memory.close()
            raise

        def retract() -> None:
            while lent:
                self._fd_server.withdraw(lent.pop())

        token = json.dumps(["".join(lent), path, is_writable, part.file])
        place = part.offset, part.offset + nbytes
        doubt = UNNAMED if fd is None else None
        return Exported(memory, Kind.FILE, token, *place, retract, doubt)

    def open(self, handle: Handle, rank: int) -> Memory:
        if handle.kind != Kind.FILE:
            return super().open(handle, rank)
        where = HostFile(*json.loads(handle.token))
        part = FilePart(where.file, handle.offset)
        if not where.lent:
            return HostMemory(*mapped.map_twin(part, handle.nbytes, is_writable=where.is_writable))
        fd = fetch_fd(rank, where.lent, self._timeout_s)
        return HostMemory(*mapped.map_part(fd, part, handle.nbytes, is_writable=where.is_writable))

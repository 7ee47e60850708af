"""Snapshots of one rank's segment: copies in three buffers in turn, which wait for nobody."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.errors import describe
from mpishare.memory.shared import reserve_part
from mpishare.viewers import page as layout
from mpishare.viewers.page import BUFFERS, DEVICE, END, HOST

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.backends import Backend, Memory, Signals
    from mpishare.memory.shared import SharedMemory

log = logging.getLogger("mpishare.window")


class Page:
    """The page of a window, and this rank's part of the file behind it.

    Parameters
    ----------
    memory : SharedMemory
        The page, with its file open.
    address : int
        Where the GPU of this rank sees it; 0 on the host backend.
    rank : int
        This rank.
    offset, nbytes : int, bytes
        Where the host buffers of this rank begin in the file; the size of its segment.
    is_first : bool
        Whether this rank is the first that has a segment.
    is_only : bool
        Whether no other rank has one.
    """

    def __init__(
        self,
        memory: SharedMemory,
        address: int,
        rank: int,
        offset: int,
        nbytes: int,
        *,
        is_first: bool,
        is_only: bool,
    ) -> None:
        self.words = memoryview(memory.buffer).cast("Q")
        self.nbytes = nbytes
        self.step = layout.buffer_nbytes(nbytes)
        self.slot = layout.slot(rank)
        self.rank = rank
        self.is_first = is_first
        self.is_only = is_only
        self._fd = memory.fd
        self._offset = offset
        self._address = address

    def address(self, word: int) -> int:
        """Return where the GPU sees a word of this rank's slot."""
        return self._address + 8 * (self.slot + word)

    def reserve(self) -> SharedMemory:
        """Reserve and map the host buffers of this rank; UnsupportedError if there is no room."""
        memory = reserve_part(self._fd, self._offset, BUFFERS * self.step)
        memory.close_file()  # the mapping does not need it
        return memory


class HostSnapshots:
    """Snapshots on the host backend: the call itself copies."""

    def __init__(self, page: Page, memory_barrier: Callable[[], None]) -> None:
        self._page = page
        self._memory_barrier = memory_barrier
        self._buffers: list[Any] = []
        self._memory: SharedMemory | None = None
        self._number = 0

    def take(self, array: Any) -> None:
        """Copy the segment into the next buffer. Local, host-blocking."""
        if not self._buffers:
            self._make_buffers(array)
        number = self._number + 1
        words, place = self._page.words, self._page.slot + HOST + number % BUFFERS
        words[place] = number
        self._memory_barrier()
        np.copyto(self._buffers[number % BUFFERS], array)
        self._memory_barrier()
        words[place + END] = number
        self._number = number

    def close(self) -> None:
        """Unmap the buffers. Local."""
        self._buffers = []
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _make_buffers(self, array: Any) -> None:
        self._memory = self._page.reserve()
        whole = np.frombuffer(self._memory.buffer, dtype=np.uint8)
        step = self._page.step
        self._buffers = [
            np.ndarray(array.shape, array.dtype, whole[place * step :]) for place in range(BUFFERS)
        ]


class CudaSnapshots:
    """Snapshots on CUDA: copies within the GPU, in the order of a stream.

    Behind the three buffers stand three marks on the GPU: the number that each buffer holds or is
    about to hold, for copies to the host that run behind.
    """

    def __init__(self, page: Page, backend: Backend) -> None:
        self._page = page
        self._backend = backend
        self._memory: Memory | None = None
        self._begin: list[Signals] = []
        self._end: list[Signals] = []
        self._number = 0
        self._host_copies: HostCopies | None = None

    def take(self, address: int, stream: int) -> None:
        """Enqueue the copy of the segment into the next buffer. Local; does not block."""
        page, backend = self._page, self._backend
        memory = self._memory or self._make_buffers()
        number = self._number + 1
        place = number % BUFFERS
        # The mark is written behind BEGIN and before the copy: each write is seen everywhere
        # before the next thing on the stream begins.
        self._begin[place].enqueue(stream, [number, number])
        if page.nbytes:
            backend.copy(memory.address + place * page.step, address, page.nbytes, stream)
        self._end[place].enqueue(stream, [number])
        self._number = number
        if page.words[layout.WANTED]:
            if self._host_copies is None:
                self._host_copies = HostCopies(page, backend, memory.address)
            self._host_copies.follow(number, stream)

    def close(self, *, is_viewed: bool) -> bool:
        """Free the buffers, unless a viewer still maps them. Local, once all streams are done."""
        if self._host_copies is not None:
            self._host_copies.close()
            self._host_copies = None
        if self._memory is not None and not is_viewed and self._memory.close():
            self._memory = None
        return self._memory is None

    def _make_buffers(self) -> Memory:
        page, backend = self._page, self._backend
        memory = backend.allocate(BUFFERS * page.step + 8 * BUFFERS)
        try:
            token = bytes.fromhex(backend.publish(memory))
            marks = memory.address + BUFFERS * page.step
            for place in range(BUFFERS):
                begin, end = (page.address(DEVICE + place + part) for part in (0, END))
                begins = [("write", begin), ("write", marks + 8 * place)]
                self._begin.append(backend.signals(begins))
                self._end.append(backend.signals([("write", end)]))
        except BaseException:
            memory.close()
            self._begin, self._end = [], []
            raise
        layout.write_token(page.words, page.rank, token)
        page.words[page.slot + layout.TOKEN_READY] = 1
        self._memory = memory
        return memory


class HostCopies:
    """Copies of snapshots from the GPU to host memory, for viewers that have no such GPU.

    They run on a stream of their own, so that the user's stream is delayed by the record of an
    event alone. Host memory is reserved and pinned by a thread, since that takes its time.
    """

    def __init__(self, page: Page, backend: Backend, source: int) -> None:
        self._page = page
        self._backend = backend
        self._source = source
        self._memory: SharedMemory | None = None
        self._target = 0
        self._begin: list[Signals] = []
        self._end: list[Signals] = []
        self._stream: Any = None
        self._event: Any = None
        self._is_ready = False
        self._thread = threading.Thread(target=self._prepare, name="mpishare-host-copies")
        self._thread.start()

    def follow(self, number: int, stream: int) -> None:
        """Enqueue the copy of the snapshot that was just enqueued on a stream, if it is its turn.

        Each rank copies what it can, and skips what comes too fast for it. TARGET is copied by all:
        else no snapshot might be there of every rank.
        """
        if not self._is_ready:
            return
        page, backend = self._page, self._backend
        is_idle = backend.is_done(self._stream)
        if page.is_first and is_idle and page.words[layout.TARGET] < number:
            # Ahead of this rank, for ranks that are ahead of it.
            page.words[layout.TARGET] = number + (0 if page.is_only else 2)
        if not is_idle and number != page.words[layout.TARGET]:
            return
        place = number % BUFFERS
        backend.record(self._event, stream)
        backend.wait_event(self._event, self._stream)
        self._begin[place].enqueue(self._stream, [number])
        if page.nbytes:
            offset = place * page.step
            backend.copy(self._target + offset, self._source + offset, page.nbytes, self._stream)
        # The mark has another number by now if the buffer was overwritten meanwhile.
        mark = self._source + BUFFERS * page.step + 8 * place
        backend.copy(page.address(HOST + layout.MARK + place), mark, 8, self._stream)
        self._end[place].enqueue(self._stream, [number])

    def close(self) -> None:
        """Unpin and unmap, once the stream is done. Local; waits for the thread."""
        self._thread.join()
        if self._is_ready and self._memory is not None:
            self._backend.close_stream(self._stream)
            self._backend.close_events([self._event])
            self._backend.unregister(self._memory)
            self._memory.close()
        self._is_ready = False

    def _prepare(self) -> None:
        page, backend = self._page, self._backend
        memory = None
        try:
            backend.make_current()
            memory = page.reserve()
            self._target = backend.register(memory)
            self._stream = int(backend.new_stream())
            self._event = backend.local_event()
            for place in range(BUFFERS):
                begin, end = (page.address(HOST + place + part) for part in (0, END))
                self._begin.append(backend.signals([("write", begin)]))
                self._end.append(backend.signals([("write", end)]))
        except Exception as error:
            # A viewer asked for it, so it is the viewer that is told, by the page.
            page.words[page.slot + layout.HOST_FAILED] = 1
            log.warning(
                "no snapshots in host memory for viewers without a GPU: %s", describe(error)
            )
            if memory is not None:
                if self._target:
                    backend.unregister(memory)
                memory.close()
            return
        self._memory = memory
        self._is_ready = True

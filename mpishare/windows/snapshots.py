"""Snapshots of one rank's segment: copies in three buffers in turn, without waiting for readers."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.errors import describe
from mpishare.memory.memory import host_anchor, host_array
from mpishare.memory.shared import reserve_part
from mpishare.windows import page as layout
from mpishare.windows.page import BEGIN, BUFFERS, DEVICE, END, HOST

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.backends import Backend, Signals
    from mpishare.memory.memory import Memory
    from mpishare.memory.shared import SharedMemory

# Bytes per second that a viewer can copy, and leave a core to others.
_READ_RATE = 4e9
_SPACING_S = 0.002

log = logging.getLogger("mpishare.window")


class Page:
    """The page of a window, and this rank's part of the file behind it.

    `address` is that of the page on this rank's GPU, 0 on the host backend; `sizes` has the bytes
    of every rank's segment, None without one.
    """

    def __init__(
        self, memory: SharedMemory, address: int, rank: int, sizes: Sequence[int | None]
    ) -> None:
        self.words = memoryview(memory.buffer).cast("Q")
        self.nbytes = sizes[rank] or 0
        self.step = layout.buffer_nbytes(self.nbytes)
        self.slot = layout.slot(rank)
        self.rank = rank
        self.total_nbytes = sum(filter(None, sizes))
        self.is_first = all(nbytes is None for nbytes in sizes[:rank])
        self._fd = memory.fd
        self._offset = layout.block_offsets(sizes)[0][rank]
        self._address = address

    def address(self, word: int) -> int:
        """Return the address of a word of this rank's slot on the GPU."""
        return self._address + 8 * (self.slot + word)

    def reserve(self) -> SharedMemory:
        """Reserve and map the host buffers of this rank; `UnsupportedError` if there is no room."""
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

    def take(self, number: int, array: Any, stream: int) -> None:
        """Copy the segment into the buffer of this number. Host-blocking."""
        del stream
        if not self._buffers:
            self._make_buffers(array)
        words, place = self._page.words, self._page.slot + HOST + number % BUFFERS
        words[place + BEGIN] = number
        self._memory_barrier()
        np.copyto(self._buffers[number % BUFFERS], array)
        self._memory_barrier()
        words[place + END] = number

    def close(self, *, is_viewed: bool) -> bool:
        del is_viewed  # what viewers map stays theirs
        self._buffers = []
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        return True

    def _make_buffers(self, array: Any) -> None:
        self._memory = self._page.reserve()
        whole = host_anchor(self._memory.buffer)
        step = self._page.step
        self._buffers = [
            host_array(whole, array.shape, array.dtype, array.strides, place * step)
            for place in range(BUFFERS)
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
        self._host_copies: HostCopies | None = None

    def take(self, number: int, array: Any, stream: int) -> None:
        """Enqueue the copy of the segment into the buffer of this number."""
        page, backend = self._page, self._backend
        memory = self._memory or self._make_buffers()
        place = number % BUFFERS
        # The mark is written behind BEGIN and before the copy: each write is visible everywhere
        # before the next operation on the stream begins.
        self._begin[place].enqueue(stream, [number, number])
        if page.nbytes:
            backend.copy(memory.address + place * page.step, array.data.ptr, page.nbytes, stream)
        self._end[place].enqueue(stream, [number])
        if page.words[layout.WANTED]:
            if self._host_copies is None:
                self._host_copies = HostCopies(page, backend, memory.address)
            self._host_copies.follow(number, stream)

    def close(self, *, is_viewed: bool) -> bool:
        """Free the buffers, unless a viewer still maps them, once all streams are done."""
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
                begin, end = (page.address(DEVICE + place + part) for part in (BEGIN, END))
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
    event alone; first into a fourth buffer on the GPU, since the copy to the host takes longer than
    the three remain unchanged. Memory is reserved and pinned by a thread, since both are slow.
    """

    def __init__(self, page: Page, backend: Backend, source: int) -> None:
        self._page = page
        self._backend = backend
        self._source = source
        self._held = ExitStack()  # what `_prepare` has made, as far as it came
        self._target = 0
        self._buffer = 0
        self._begin: list[Signals] = []
        self._end: list[Signals] = []
        self._stream: Any = None
        self._event: Any = None
        self._last = 0.0
        self._spacing_s = _SPACING_S + page.total_nbytes / _READ_RATE
        self._is_ready = False
        self._thread = threading.Thread(target=self._prepare, name="mpishare-host-copies")
        self._thread.start()

    def follow(self, number: int, stream: int) -> None:
        """Enqueue the copy of the snapshot that was just enqueued on a stream, if it is its turn.

        All ranks copy the same numbers, so that there are snapshots of every rank, and no more of
        them than a viewer can read.
        """
        stride = self._page.words[layout.STRIDE] or 1
        if not self._is_ready or number % stride:
            return
        if self._page.is_first:
            self._pace(stride)
        page, backend, own = self._page, self._backend, self._stream
        place = number % BUFFERS
        buffer, marks = self._buffer, self._source + BUFFERS * page.step
        backend.record(self._event, stream)
        backend.wait_event(self._event, own)
        if page.nbytes:
            backend.copy(buffer, self._source + place * page.step, page.nbytes, own)
        # The mark has another number by now if the buffer was overwritten meanwhile.
        backend.copy(buffer + page.step, marks + 8 * place, 8, own)
        self._begin[place].enqueue(own, [number])
        if page.nbytes:
            backend.copy(self._target + place * page.step, buffer, page.nbytes, own)
        backend.copy(page.address(HOST + layout.MARK + place), buffer + page.step, 8, own)
        self._end[place].enqueue(own, [number])

    def close(self) -> None:
        """Unpin and unmap, once the stream is done. Waits for the thread."""
        self._thread.join()
        self._is_ready = False
        self._held.close()

    def _pace(self, stride: int) -> None:
        """Adapt the interval of the copies to the rate at which viewers can read them."""
        now = time.monotonic()
        waited_s, self._last = now - self._last, now
        if waited_s < self._spacing_s:
            self._page.words[layout.STRIDE] = 2 * stride
        elif waited_s > 4 * self._spacing_s and stride > 1:
            self._page.words[layout.STRIDE] = stride // 2

    def _prepare(self) -> None:
        page, backend, held = self._page, self._backend, self._held
        try:
            backend.make_current()
            memory = page.reserve()
            held.callback(memory.close)
            self._target = backend.register(memory)
            held.callback(backend.unregister, memory)
            self._buffer = held.enter_context(closing(backend.allocate(page.step + 8))).address
            self._event = backend.local_event()
            held.callback(backend.close_events, [self._event])
            self._stream = int(backend.new_stream())
            held.callback(backend.close_stream, self._stream)
            for place in range(BUFFERS):
                begin, end = (page.address(HOST + place + part) for part in (BEGIN, END))
                self._begin.append(backend.signals([("write", begin)]))
                self._end.append(backend.signals([("write", end)]))
        except Exception as error:
            # Not an error of this rank: the page reports it to the viewer that asked.
            page.words[page.slot + layout.HOST_FAILED] = 1
            log.warning(
                "no snapshots in host memory for viewers without a GPU: %s", describe(error)
            )
        else:
            self._is_ready = True

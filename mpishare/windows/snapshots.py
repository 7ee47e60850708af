"""Snapshots of one rank's segment: copies in buffers in turn, without waiting for readers."""

from __future__ import annotations

import logging
import threading
import time
from array import array as array_of
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.errors import describe
from mpishare.memory.memory import host_anchor, host_array
from mpishare.memory.shared import reserve_part, whole_pages
from mpishare.windows import page as layout
from mpishare.windows.page import BEGIN, DEVICE, END, HOST, NUMBERS, Places

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.backends import Backend, Signals
    from mpishare.memory.memory import ArrayLayout, Memory
    from mpishare.memory.shared import SharedMemory

# Bytes per second that a viewer can copy, and leave a core to others.
_READ_RATE = 4e9
_SPACING_S = 0.002

log = logging.getLogger("mpishare.window")


class Page:
    """The page of a window, and this rank's part of the file behind it.

    `address` is that of the page on this rank's GPU, 0 on the host backend.
    """

    def __init__(
        self, memory: SharedMemory, address: int, rank: int, places: Places, layout: ArrayLayout
    ) -> None:
        sizes = places.sizes
        self.words = memoryview(memory.buffer).cast("Q")
        self.layout = layout
        self.nbytes = layout.nbytes
        self.buffers = places.buffers
        self.step = whole_pages(self.nbytes)
        self.slot = places.slot(rank)
        self.total_nbytes = sum(filter(None, sizes))
        self.is_first = all(nbytes is None for nbytes in sizes[:rank])
        self._places = places
        self._rank = rank
        self._fd = memory.fd
        self._offset = places.blocks()[0][rank]
        self._address = address

    def at(self, track: int, number: int) -> int:
        """Return the first word of this rank's record of a snapshot."""
        return self._places.track(self._rank, track, number)

    def addresses(self, track: int, number: int, words: Sequence[int]) -> list[int]:
        """Return the addresses of words of that record on the GPU."""
        first = self.at(track, number)
        return [self._address + 8 * (first + word) for word in words]

    def reserve(self) -> SharedMemory:
        """Reserve and map the host buffers of this rank; `UnsupportedError` if there is no room."""
        memory = reserve_part(self._fd, self._offset, self.buffers * self.step)
        memory.close_file()  # the mapping does not need it
        return memory


class HostSnapshots:
    """Snapshots on the host backend: the call itself copies."""

    def __init__(self, page: Page, memory_barrier: Callable[[], None]) -> None:
        self._page = page
        self._memory_barrier = memory_barrier
        self._buffers: list[Any] = []  # they keep their memory mapped

    def take(self, number: int, array: Any, numbers: list[int], stream: int) -> None:
        """Copy the segment into the buffer of this number, with these words. Host-blocking."""
        del stream
        if not self._buffers:
            self.make_buffers()
        words, at = self._page.words, self._page.at(HOST, number)
        words[at + BEGIN] = number
        self._memory_barrier()
        words[at + NUMBERS : at + NUMBERS + len(numbers)] = memoryview(array_of("Q", numbers))
        np.copyto(self._buffers[number % len(self._buffers)], array)
        self._memory_barrier()
        words[at + END] = number

    def close(self, *, is_viewed: bool) -> bool:
        del is_viewed  # what viewers map stays theirs
        self._buffers = []
        return True

    def make_buffers(self) -> None:
        """Take the memory of the copies."""
        page = self._page
        whole = host_anchor(page.reserve().buffer)
        offsets = [place * page.step for place in range(page.buffers)]
        self._buffers = [host_array(whole, page.layout._replace(offset=at)) for at in offsets]


class CudaSnapshots:
    """Snapshots on CUDA: copies within the GPU, in the order of a stream.

    Behind the buffers stand as many marks on the GPU: the number that each buffer holds or is about
    to hold, for copies to the host that run behind.
    """

    def __init__(self, page: Page, backend: Backend) -> None:
        self._page = page
        self._backend = backend
        self._made: tuple[Memory, Records] | None = None
        self._host_copies: HostCopies | None = None

    def take(self, number: int, array: Any, numbers: list[int], stream: int) -> None:
        """Enqueue the copy of the segment into the buffer of this number, with these words."""
        page, backend = self._page, self._backend
        memory, records = self._made or self.make_buffers()
        place = number % page.buffers
        # The mark is written behind BEGIN and before the copy: each write is visible everywhere
        # before the next operation on the stream begins.
        records.begin(number, numbers, stream)
        if page.nbytes:
            backend.copy(memory.address + place * page.step, array.data.ptr, page.nbytes, stream)
        records.end(number, stream)
        if page.words[layout.WANTED]:
            if self._host_copies is None:
                self._host_copies = HostCopies(page, backend, memory.address)
            self._host_copies.follow(number, numbers, stream)

    def close(self, *, is_viewed: bool) -> bool:
        """Free the buffers, unless a viewer still maps them, once all streams are done."""
        if self._host_copies is not None:
            self._host_copies.close()
            self._host_copies = None
        if self._made is not None and not is_viewed and self._made[0].close():
            self._made = None
        return self._made is None

    def make_buffers(self) -> tuple[Memory, Records]:
        """Take the memory of the copies, and tell viewers where it is."""
        page, backend = self._page, self._backend
        memory = backend.allocate(page.buffers * (page.step + 8))
        try:
            token = bytes.fromhex(backend.publish(memory))
        except BaseException:
            memory.close()
            raise
        layout.write_token(page.words, page.slot, token)
        page.words[page.slot + layout.TOKEN_READY] = 1
        marks = memory.address + page.buffers * page.step
        self._made = memory, Records(page, backend, DEVICE, marks)
        return self._made


class Records:
    """The records of one track, written in the order of a stream.

    `marks` is the address of the marks of the buffers on the GPU, 0 where they are not written.
    """

    def __init__(self, page: Page, backend: Backend, track: int, marks: int = 0) -> None:
        self._page = page
        self._backend = backend
        self._track = track
        self._marks = marks
        self._begins: dict[tuple[int, int], Signals] = {}
        self._ends: dict[int, Signals] = {}

    def begin(self, number: int, numbers: list[int], stream: int) -> None:
        """Enqueue the begin of a snapshot, and the numbers beside it."""
        place = number % self._page.buffers
        key = place, len(numbers)
        if key not in self._begins:
            words = [BEGIN, *range(NUMBERS, NUMBERS + len(numbers))]
            addresses = self._page.addresses(self._track, number, words)
            addresses[1:1] = [self._marks + 8 * place] if self._marks else []
            self._begins[key] = self._backend.signals([("write", each) for each in addresses])
        marks = [number] if self._marks else []
        self._begins[key].enqueue(stream, [number, *marks, *numbers])

    def end(self, number: int, stream: int) -> None:
        place = number % self._page.buffers
        if place not in self._ends:
            (address,) = self._page.addresses(self._track, number, [END])
            self._ends[place] = self._backend.signals([("write", address)])
        self._ends[place].enqueue(stream, [number])


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
        self._records = Records(page, backend, HOST)
        self._stream: Any = None
        self._event: Any = None
        self._last = 0.0
        self._spacing_s = _SPACING_S + page.total_nbytes / _READ_RATE
        self._is_ready = False
        self._thread = threading.Thread(target=self._prepare, name="mpishare-host-copies")
        self._thread.start()

    def follow(self, number: int, numbers: list[int], stream: int) -> None:
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
        place = number % page.buffers
        buffer, marks = self._buffer, self._source + page.buffers * page.step
        backend.record(self._event, stream)
        backend.wait_event(self._event, own)
        if page.nbytes:
            backend.copy(buffer, self._source + place * page.step, page.nbytes, own)
        # The mark has another number by now if the buffer was overwritten meanwhile.
        backend.copy(buffer + page.step, marks + 8 * place, 8, own)
        self._records.begin(number, numbers, own)
        if page.nbytes:
            backend.copy(self._target + place * page.step, buffer, page.nbytes, own)
        (mark,) = page.addresses(HOST, number, [layout.MARK])
        backend.copy(mark, buffer + page.step, 8, own)
        self._records.end(number, own)

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
        except Exception as error:
            # Not an error of this rank: the page reports it to the viewer that asked.
            page.words[page.slot + layout.HOST_FAILED] = 1
            log.warning(
                "no snapshots in host memory for viewers without a GPU: %s", describe(error)
            )
        else:
            self._is_ready = True

"""Snapshots of one rank's segment: copies in buffers in turn, without waiting for readers."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.errors import describe
from mpishare.memory.memory import address_of, host_anchor, host_array
from mpishare.memory.shared import reserve_part, whole_pages

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.backends import Backend, Signals
    from mpishare.memory.memory import ArrayLayout, Memory
    from mpishare.memory.shared import SharedMemory
    from mpishare.view.page import Page

# Bytes per second that a viewer can copy, and leave a core to others.
_READ_RATE = 4e9
_SPACING_S = 0.002

log = logging.getLogger("mpishare.window")


class Slot:
    """This rank's slot in the page of a window, and its part of the file behind it.

    `fd` is that file; `shift` leads from addresses of the page here to those on the rank's GPU.
    """

    def __init__(self, page: Page, fd: int, shift: int, index: int, layout: ArrayLayout) -> None:
        places = page.places
        self.header = page.header
        self.words = page.slots[index]
        self.layout = layout
        self.nbytes = layout.nbytes
        self.buffers = places.buffers
        self.step = whole_pages(self.nbytes)
        self.total_nbytes = sum(places.sizes)
        self.is_first = not index
        self._fd = fd
        self._offset = places.blocks()[0][index]
        self._shift = shift

    def address(self, words: np.ndarray[Any, Any]) -> int:
        """Return the address of the first of these words on the GPU."""
        return address_of(words) + self._shift

    def reserve(self) -> SharedMemory:
        """Reserve and map the host buffers of this rank; `UnsupportedError` if there is no room."""
        memory = reserve_part(self._fd, self._offset, self.buffers * self.step)
        memory.close_file()  # the mapping does not need it
        return memory


class HostSnapshots:
    """Snapshots on the host backend: the call itself copies."""

    def __init__(self, slot: Slot, memory_barrier: Callable[[], object]) -> None:
        self._slot = slot
        self._track = slot.words["records"]["host"]
        self._memory_barrier = memory_barrier
        self._buffers: list[Any] = []  # they keep their memory mapped

    def take(self, number: int, array: Any, numbers: list[int], stream: int) -> None:
        """Copy the segment into the buffer of this number, with these words. Host-blocking."""
        del stream
        if not self._buffers:
            self.make_buffers()
        track, place = self._track, number % len(self._buffers)
        track["begin"][place] = number
        self._memory_barrier()
        track["numbers"][place, : len(numbers)] = numbers
        np.copyto(self._buffers[place], array)
        self._memory_barrier()
        track["end"][place] = number

    def close(self, *, is_viewed: bool) -> bool:
        del is_viewed  # what viewers map stays theirs
        self._buffers = []
        return True

    def make_buffers(self) -> None:
        """Take the memory of the copies."""
        slot = self._slot
        whole = host_anchor(slot.reserve().buffer)
        offsets = [place * slot.step for place in range(slot.buffers)]
        self._buffers = [host_array(whole, slot.layout._replace(offset=at)) for at in offsets]


class CudaSnapshots:
    """Snapshots on CUDA: copies within the GPU, in the order of a stream.

    Behind the buffers stand as many marks on the GPU: the number that each buffer holds or is about
    to hold, for copies to the host that run behind.
    """

    def __init__(self, slot: Slot, backend: Backend) -> None:
        self._slot = slot
        self._backend = backend
        self._made: tuple[Memory, Records] | None = None
        self._host_copies: HostCopies | None = None

    def take(self, number: int, array: Any, numbers: list[int], stream: int) -> None:
        """Enqueue the copy of the segment into the buffer of this number, with these words."""
        slot, backend = self._slot, self._backend
        memory, records = self._made or self.make_buffers()
        place = number % slot.buffers
        # The mark is written behind BEGIN and before the copy: each write is visible everywhere
        # before the next operation on the stream begins.
        records.begin(number, numbers, stream)
        if slot.nbytes:
            backend.copy(memory.address + place * slot.step, array.data.ptr, slot.nbytes, stream)
        records.end(number, stream)
        if slot.header["wanted"]:
            if self._host_copies is None:
                self._host_copies = HostCopies(slot, backend, memory.address)
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
        slot, backend = self._slot, self._backend
        memory = backend.allocate(slot.buffers * (slot.step + 8))
        try:
            token = bytes.fromhex(backend.publish(memory))
        except BaseException:
            memory.close()
            raise
        slot.words["token"] = np.frombuffer(token, "u1")
        slot.words["has_token"] = 1
        marks = memory.address + slot.buffers * slot.step
        self._made = memory, Records(slot, backend, "device", marks)
        return self._made


class Records:
    """The records of one track, written in the order of a stream.

    `marks` is the address of the marks of the buffers on the GPU, 0 where they are not written.
    """

    def __init__(self, slot: Slot, backend: Backend, track: str, marks: int = 0) -> None:
        self._slot = slot
        self._backend = backend
        self._track = slot.words["records"][track]
        self._marks = marks
        self._begins: dict[tuple[int, int], Signals] = {}
        self._ends: dict[int, Signals] = {}

    def begin(self, number: int, numbers: list[int], stream: int) -> None:
        """Enqueue the begin of a snapshot, and the numbers beside it."""
        place = number % self._slot.buffers
        key = place, len(numbers)
        if key not in self._begins:
            first = self.address("numbers", number)
            addresses = [first + 8 * word for word in range(len(numbers))]
            marks = [self._marks + 8 * place] if self._marks else []
            addresses = [self.address("begin", number), *marks, *addresses]
            self._begins[key] = self._backend.signals([("write", each) for each in addresses])
        marks = [number] if self._marks else []
        self._begins[key].enqueue(stream, [number, *marks, *numbers])

    def end(self, number: int, stream: int) -> None:
        place = number % self._slot.buffers
        if place not in self._ends:
            self._ends[place] = self._backend.signals([("write", self.address("end", number))])
        self._ends[place].enqueue(stream, [number])

    def address(self, words: str, number: int) -> int:
        """Return the address of words of the record of a snapshot on the GPU."""
        return self._slot.address(self._track[words][number % self._slot.buffers :])


class HostCopies:
    """Copies of snapshots from the GPU to host memory, for viewers that have no such GPU.

    They run on a stream of their own, so that the user's stream is delayed by the record of an
    event alone; first into a fourth buffer on the GPU, since the copy to the host takes longer than
    the three remain unchanged. Memory is reserved and pinned by a thread, since both are slow.
    """

    def __init__(self, slot: Slot, backend: Backend, source: int) -> None:
        self._slot = slot
        self._backend = backend
        self._source = source
        self._held = ExitStack()  # what `_prepare` has made, as far as it came
        self._target = 0
        self._buffer = 0
        self._records = Records(slot, backend, "host")
        self._stream: Any = None
        self._event: Any = None
        self._last = 0.0
        self._spacing_s = _SPACING_S + slot.total_nbytes / _READ_RATE
        self._is_ready = False
        self._thread = threading.Thread(target=self._prepare, name="mpishare-host-copies")
        self._thread.start()

    def follow(self, number: int, numbers: list[int], stream: int) -> None:
        """Enqueue the copy of the snapshot that was just enqueued on a stream, if it is its turn.

        All ranks copy the same numbers, so that there are snapshots of every rank, and no more of
        them than a viewer can read.
        """
        stride = int(self._slot.header["stride"]) or 1
        if not self._is_ready or number % stride:
            return
        if self._slot.is_first:
            self._pace(stride)
        slot, backend, own = self._slot, self._backend, self._stream
        place = number % slot.buffers
        buffer, marks = self._buffer, self._source + slot.buffers * slot.step
        backend.order(self._event, stream, own)
        if slot.nbytes:
            backend.copy(buffer, self._source + place * slot.step, slot.nbytes, own)
        # The mark has another number by now if the buffer was overwritten meanwhile.
        backend.copy(buffer + slot.step, marks + 8 * place, 8, own)
        self._records.begin(number, numbers, own)
        if slot.nbytes:
            backend.copy(self._target + place * slot.step, buffer, slot.nbytes, own)
        backend.copy(self._records.address("mark", number), buffer + slot.step, 8, own)
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
            self._slot.header["stride"] = 2 * stride
        elif waited_s > 4 * self._spacing_s and stride > 1:
            self._slot.header["stride"] = stride // 2

    def _prepare(self) -> None:
        slot, backend, held = self._slot, self._backend, self._held
        try:
            backend.make_current()
            memory = slot.reserve()
            held.callback(memory.close)
            self._target = backend.register(memory)
            held.callback(backend.unregister, memory)
            self._buffer = held.enter_context(closing(backend.allocate(slot.step + 8))).address
            self._event = backend.local_event()
            held.callback(backend.close_events, [self._event])
            self._stream = int(backend.new_stream())
            held.callback(backend.close_stream, self._stream)
        except Exception as error:
            # Not an error of this rank: the page reports it to the viewer that asked.
            slot.words["host_failed"] = 1
            log.warning(
                "no snapshots in host memory for viewers without a GPU: %s", describe(error)
            )
        else:
            self._is_ready = True

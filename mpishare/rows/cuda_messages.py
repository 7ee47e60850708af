"""Rows in GPU memory that go to ranks of other nodes by MPI: kernels pack them in pinned memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from mpishare.rows import records
from mpishare.rows.messages import MessagePair, late

if TYPE_CHECKING:
    from collections.abc import Collection

    from mpishare.backends import StreamInfo
    from mpishare.plans.engine import RoutedSetup

    Array = np.ndarray[Any, Any]


class CudaMessages:
    """The rows of one plan that travel by messages of MPI: those of the keys at these places."""

    def __init__(self, engine: Any, setup: RoutedSetup, places: Collection[int]) -> None:
        comm, form, self._engine, self._slots = setup.comm, engine.form, engine, engine.slots
        self._comm, self._context, self._form = comm, comm.context, form
        self._keys = {place: form.keys[place] for place in sorted(places)}
        self._pairs = {at: MessagePair(comm, form, key) for at, key in self._keys.items()}
        self._pinned: dict[int, Array] = {}

    def skip(self, *_: Any) -> None:
        """Do nothing: `trade` does all, and waits for it with the deadline."""

    begin = send = end = close = skip
    peers = None

    def make_slots(self) -> None:
        """Have memory for the kernels to pack in, once the table is made."""
        for place in self._keys:
            self._reserve(place, 1)

    def _reserve(self, place: int, scale: int) -> None:
        nbytes = records.HEADER_NBYTES + scale * self._slots.slot
        memory = cupy.cuda.alloc_pinned_memory(nbytes)
        self._pinned[place] = np.frombuffer(memory, np.uint8, nbytes)
        self._header(place)[:] = 0
        self._slots.keys[place]["theirs"] = memory.ptr
        self._slots.set(place, memory.ptr + records.HEADER_NBYTES, 0, scale)

    def _header(self, place: int) -> Array:
        return self._pinned[place][: records.HEADER_NBYTES].view(np.uint64)

    def trade(self, entered: StreamInfo) -> None:
        """Send what was packed, and upload what comes. Host-blocking."""
        call, epoch, stream = f"{self._engine.name}: wait", self._engine.epoch, entered[0]
        if more := self._take_packed(call, epoch):
            self._slots.publish(stream)
            self._engine.pack_again(more, stream)
            self._take_packed(call, epoch)
        keys, pairs = [*self._keys.values()], [*self._pairs.values()]
        for each in pairs:
            each.send()
        self._comm.wait_anywhere(call, lambda: late(keys, pairs, epoch))
        for place, each in self._pairs.items():
            each.open(epoch)
            self._upload(place, each, epoch, stream)

    def _take_packed(self, call: str, epoch: int) -> int:
        """Copy what was packed into messages; return the keys whose rows had no room, as bits."""
        tag = epoch & 0xFFFFFFFF

        def is_packed() -> bool:
            return all(int(self._header(at)[0]) >> 32 == tag for at in self._keys)

        self._context.wait_until(is_packed, call)
        self._context.memory_barrier()
        self._slots.held.clear()  # the stream is past these
        more = 0
        for place, pair in self._pairs.items():
            count, credit, wanted = map(int, self._header(place)[: records.ROWS])
            count &= 0xFFFFFFFF
            room = self._slots.rooms[place]
            if count <= room:
                pair.reserve(count, credit, wanted)
                self._copy(place, room // self._form.room, pair.slot(epoch))
            else:
                more |= 1 << place
            if wanted > room:
                self._reserve(place, self._slots.scale_for(wanted))
        return more

    def _copy(self, place: int, scale: int, columns: list[Array]) -> None:
        packed, slots = self._pinned[place], self._slots
        begins = slots.columns_at(records.HEADER_NBYTES, scale)
        for column, at in zip(columns, begins, strict=True):
            column[...] = packed[at : at + column.nbytes].view(column.dtype).reshape(column.shape)

    def _upload(self, place: int, came: MessagePair, epoch: int, stream: int) -> None:
        slots = self._slots
        room, rows = slots.scales[place] * self._form.room, max(came.count, came.wanted)
        if rows > room:
            slots.enlarge(place, rows, is_needed=came.count > room)
        scale, rows = slots.scales[place], slots.bases[place]
        for column, address in zip(came.columns, slots.columns_at(rows, scale), strict=True):
            if came.count:
                slots.upload(address, column, stream)
        words = epoch << 32 | came.count, came.credit, came.wanted, rows, scale
        slots.upload(slots.header_at(place, 0), np.array(words, np.uint64), stream)

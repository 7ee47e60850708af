"""Slots of rows in GPU memory, and the larger ones that a receiver makes and its peer takes.

Kernels tell the host how many rows came at most. A rank whose slots were too small for these makes
larger ones at its next call, and writes their handle to pinned memory, where the sender finds it at
its own next call. Nobody waits for the other: each header has the address of its rows.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.coordination.counters import NO_WORDS
from mpishare.memory.handle import Handle
from mpishare.plans.gpu.staging import PlanBuffers
from mpishare.rows import records

if TYPE_CHECKING:
    from mpishare.backends.suballocator import Suballocation
    from mpishare.plans.engine import RoutedSetup
    from mpishare.plans.gpu.launch import PlanLauncher
    from mpishare.rows.form import Form

_MOST_WORDS = 1 << 30

log = logging.getLogger("mpishare.rows")


class CudaSlots(PlanBuffers):
    """The headers and slots of one plan. Collective to make; `far` are places of other nodes."""

    def __init__(self, setup: RoutedSetup, form: Form, far: set[int]) -> None:
        comm = setup.comm
        self._form, self._me, self._far, self._context = form, comm.rank, far, setup.context
        self._backend: Any = setup.context.backend
        self.slot = form.offsets(form.room)[-1]
        self._first, noffers = form.first_keys(comm.ranks_here)
        each = 2 * (records.HEADER_NBYTES + self.slot)
        nbytes = {rank: each * form.nkeys[rank] for rank in self._first}
        near = {key.rank for place, key in enumerate(form.keys) if place not in far}
        others = sorted(near - {comm.rank})
        super().__init__(comm, setup.name, nbytes, others, noffers * records.OFFER_NBYTES, [])
        self._taken: list[Suballocation] = []
        self._newest: dict[int, Suballocation] = {}  # larger slots by key
        # By key, mine and those for me: words in memory of the node.
        self._offers: dict[int, tuple[memoryview[int], memoryview[int]]] = {}
        self._opened: list[Suballocation] = []
        self.held: list[Any] = []  # what is uploaded
        self.is_changed = False  # the table, since it was published
        self.table = np.zeros(1, records.TABLE)
        self.keys = self.table["keys"][0]
        self._table_at = 0
        # Of what comes: addresses of slots for even epochs, and for how many times `room` rows.
        self.bases, self.scales = [0] * len(form.keys), [1] * len(form.keys)
        self.rooms = [form.room] * len(form.keys)  # rows that go at once
        self.largest = 1  # the scale of the largest slot that may be offered
        self.offers = NO_WORDS  # of all ranks of the node, and what their GPUs need
        # What `grow` found there; without bytes if it has to look once more.
        self.settled = b""

    def fill(self) -> None:
        """Fill the table, once the slots are mapped."""
        ranks, form, self.offers = [*self._first], self._form, self.flags.staging
        for place, key in enumerate(form.keys):
            mine, mine_rows = self._places(self._me, place)
            if place in self._far:
                mine_rows = mine + records.HEADER_NBYTES  # behind one header
                self.keys[place] = 0, mine, mine_rows, 0, 0, 0, 1, 0
            else:
                theirs, rows = self._places(key.rank, key.place)
                self.keys[place] = theirs, mine, mine_rows, rows, 0, ranks.index(key.rank), 1, 1
                given = self.offer(self._me, place)
                given[records.TAKEN] = given[records.OFFERED] = 1
                self._offers[place] = given, self.offer(key.rank, key.place)
            self.bases[place] = mine_rows
        self.table["most"] = form.room

    def sizes(self, launcher: PlanLauncher) -> Any:
        """Describe the table to the kernels."""
        form, self._table_at = self._form, launcher.upload(self.table)
        needed = self.flags.staging_address + records.OFFER_NBYTES * self._first[self._me]
        return records.Sizes(self._table_at, needed, len(form.keys), form.room, self.slot)

    def _places(self, rank: int, place: int) -> tuple[int, int]:
        """Return the addresses of the headers and the first slots of a rank's key."""
        both = 2 * records.HEADER_NBYTES
        headers = self.address_of(rank) + (both + 2 * self.slot) * place
        return headers, headers + both

    def offer(self, rank: int, place: int) -> memoryview[int]:
        """Return the words of what a rank offers for a key, and of what its kernels need there."""
        begin = records.OFFER_NBYTES * (self._first[rank] + place)
        return self.flags.staging[begin : begin + records.OFFER_NBYTES].cast("Q")

    @property
    def nbytes(self) -> int:
        """Size of this rank's own slots, and of the node's pinned memory."""
        return super().nbytes + sum(block.nbytes for block in self._taken)

    def columns_at(self, address: int, scale: int) -> list[int]:
        """Return where the columns of a slot begin."""
        return [address + scale * each for each in self._form.offsets(self._form.room)[:-1]]

    def grow(self) -> bool:
        """Make larger slots where rows did not fit, offer them, and take those of peers.

        Return whether any offer or any slot has changed.
        """
        seen, form = bytes(self.offers), self._form
        if seen == self.settled:
            return False
        self.settled = seen
        for place, (mine, theirs) in self._offers.items():
            if mine[records.NEEDED] > self.scales[place] * form.room:
                self.enlarge(place, mine[records.NEEDED], is_needed=False)
            if self.scales[place] > mine[records.OFFERED] == mine[records.TAKEN]:
                self._give(place, mine)
            if theirs[records.OFFERED] > theirs[records.TAKEN]:
                self._take(place, theirs)
        return True

    def enlarge(self, place: int, rows: int, *, is_needed: bool) -> None:
        """Make a larger slot for what comes; one that is too large only if it `is_needed` now."""
        scale = self.scale_for(rows)
        if fits(self._form, scale):
            self.largest = max(self.largest, scale)
        elif not is_needed:
            return
        rank, room = self._form.keys[place].rank, scale * self._form.room
        log.info("%s: %d rows of rank %d: slots for %d from now on", self._name, rows, rank, room)
        self._newest[place] = block = self.take_slots(scale)
        self.bases[place], self.scales[place] = block.address, scale
        self.settled = b""

    def take(self, nbytes: int) -> Suballocation:
        """Return memory on this GPU, until all ranks have closed the plan."""
        self._taken.append(self._context.suballocator.allocate(nbytes))
        return self._taken[-1]

    def take_slots(self, scale: int) -> Suballocation:
        """Return memory for the two slots of a key."""
        return self.take(2 * scale * self.slot)

    def scale_for(self, rows: int) -> int:
        """Return the size of slots for so many rows, with room for half as many more."""
        return -(-(rows + rows // 2) // self._form.room)

    def _give(self, place: int, words: memoryview[int]) -> None:
        """Offer a slot to its sender, which has taken the last one that was offered."""
        scale = self.scales[place]
        if not fits(self._form, scale):
            words[records.TAKEN] = words[records.OFFERED] = scale  # there is no offer
            return
        block = self._newest[place]
        handle = self._context.handle(
            block.token, block.offset, block.nbytes, block.memory.nbytes
        ).encode()
        begin = 8 * records.HANDLE
        words.cast("B")[begin : begin + len(handle)] = handle
        words[records.WHERE], words[records.NBYTES] = block.address, len(handle)
        self._context.memory_barrier()
        words[records.OFFERED] = scale

    def _take(self, place: int, words: memoryview[int]) -> None:
        """Send to the slots that a peer, or this rank itself, offers."""
        self._context.memory_barrier()
        scale, where = words[records.OFFERED], words[records.WHERE]
        address = where
        if self._form.keys[place].rank != self._me:
            begin = 8 * records.HANDLE
            text = bytes(words.cast("B")[begin : begin + words[records.NBYTES]]).decode()
            self._opened.append(self._context.suballocator.open(Handle.unpack(text)))
            address = self._opened[-1].address
        self.set(place, address, where, scale)
        self._context.memory_barrier()
        words[records.TAKEN] = scale

    def set(self, place: int, rows: int, there: int, scale: int) -> None:
        """Have the rows of a key packed elsewhere, once the table is published."""
        key = self.keys[place]
        key["rows"], key["there"], key["scale"] = rows, there, scale
        self.rooms[place], self.is_changed, self.settled = scale * self._form.room, True, b""

    def header_at(self, place: int, epoch: int) -> int:
        """Return the address of the header of rows that come."""
        return int(self.keys[place]["mine"]) + (epoch & 1) * records.HEADER_NBYTES

    def upload(self, address: int, array: np.ndarray[Any, Any], stream: int) -> None:
        """Copy an array on the stream, and hold it."""
        self.held.append(array)
        self._backend.upload(address, array, stream)

    def publish(self, stream: int) -> None:
        """Let kernels see the table, from here on the stream."""
        self.upload(self._table_at, self.table.copy(), stream)
        self.is_changed = False

    def release(self) -> None:
        """Unmap the slots of others."""
        while self._opened:
            self._opened.pop().close()
        super().release()

    def close(self) -> None:
        """Free this rank's slots, once all ranks have released them."""
        self._offers.clear()
        self.offers = NO_WORDS
        while self._taken:
            self._taken.pop().close()
        super().close()


def fewest_words(form: Form) -> int:
    """Return the words of a row, if its columns are as aligned as their memory."""
    return sum(column.nbytes // records.word_of(column.nbytes) for column in form.columns)


def fits(form: Form, scale: int) -> bool:
    """Whether slots for so many times `room` rows are not too large."""
    rows, nbytes = scale * form.room * max(form.nkeys), scale * form.offsets(form.room)[-1]
    return rows * fewest_words(form) < _MOST_WORDS and nbytes < 1 << 32

"""Large fields in host memory: in place in windows, read by other processes, or through slots.

By slots they go chunk by chunk, through the caches, which is the fastest with many ranks on cores
of their own; but each chunk has barriers, and at each of them a rank may lose its core to another
program. A few ranks read the fields from each other's processes, where they may.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.errors import ClosedError
from mpishare.memory.memory import ArrayLayout, address_of
from mpishare.memory.process_memory import ReadTrial, read_memory
from mpishare.plans.peer_memory import PeerProcesses
from mpishare.reduction.slots import REDUCE
from mpishare.runtime.context import Location

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mpishare.memory.memory import Memory
    from mpishare.plans.engine import PlanSetup
    from mpishare.reduction.slots import Slots

    Array = np.ndarray[Any, Any]
    Fold = Callable[[Sequence[Array], Array], None]

_MIN_IN_PLACE_NBYTES = 1 << 20
_BLOCK_NBYTES = 64 << 10  # folded, and stored in all fields, while they are in the cache
_MAX_SLOT_NBYTES = 2 << 20
_MAX_READERS = 4
"""The most ranks that read larger fields from processes.

28 ranks took 8.2 ms for 4 MiB, by chunks 4.1, and MPI 10; two took 1.0 ms for 8 MiB, by chunks 1.3.
Where other programs took half of the cores, two to four took 0.4 to 1.4 of MPI's time, by chunks
1.1 to 4.4.
"""
_READ_NBYTES = 256 << 10  # read by one system call, and folded while they are in the cache
_MAX_READ_NBYTES = 8 << 20  # of a result, by one system call, which a signal waits for
_HIDDEN = Location(0, 0, 0)  # windows count from 1; those of private memory have an address


class LargeReduce:
    """Reduces packed fields of any size in place, or by reads, or in chunks by `in_slots`.

    `fold` is in the order of the ranks.
    """

    def __init__(
        self, setup: PlanSetup, slots: Slots, fold: Fold, in_slots: Callable[[Array], None]
    ) -> None:
        self._context = setup.context
        self._slots = slots
        self._fold, self._in_slots = fold, in_slots
        self._nranks = len(slots.pair[0])
        self._dtype = slots.pair[0][0].dtype
        self._itemsize = self._dtype.itemsize
        self._ranks, self._peers = [*setup.comm.ranks_here], PeerProcesses(setup)
        self._may_read = self._nranks <= _MAX_READERS and not self._peers.unreadable
        self._blocks: Array | None = None  # of the other ranks, as read; made where it is needed

    def reduce(self, flat: Array) -> None:
        """Put the node's result into an array of one axis. Collective, host-blocking."""
        places = [_HIDDEN]
        if flat.nbytes >= _MIN_IN_PLACE_NBYTES:
            places = self._places(flat)
        if all(place.window for place in places):
            layouts = [ArrayLayout(flat.shape, flat.dtype, offset=each.offset) for each in places]
            pairs = zip(places, layouts, strict=True)
            self._reduce_in_place([self._segment(place).view(layout) for place, layout in pairs])
        elif _HIDDEN not in places:
            self._reduce_by_reads(flat, places)
        else:
            step = self._slots.size
            for begin in range(0, flat.size, step):
                self._in_slots(flat[begin : begin + step])

    def _places(self, flat: Array) -> list[Location]:
        """Return where all ranks have their fields: in windows, or where processes read them."""
        slots, address = self._slots, address_of(flat)
        place = self._context.locate(address, flat.nbytes)
        may_read = self._may_read and flat.nbytes > _MAX_SLOT_NBYTES
        if place is None and may_read and _is_readable(address, flat.nbytes):
            place = Location(0, 0, address)
        slots.publish_place(place or _HIDDEN)
        slots.meet(REDUCE)
        return slots.places()

    def _segment(self, place: Location) -> Memory:
        memory = self._context.segment_memory(place.window, place.rank)
        if memory is None:
            raise ClosedError(f"{self._slots.name}: reduce failed: window {place.window} is closed")
        return memory

    def _reduce_in_place(self, fields: Sequence[Array]) -> None:
        """Fold this rank's share, which only it reads and writes, and store it in all fields."""
        slots, first = self._slots, fields[0]
        share = self._slots.share(first.size, slots.place)
        step = _BLOCK_NBYTES // first.itemsize
        for begin in range(share.start, share.stop, step):
            block = slice(begin, min(begin + step, share.stop))
            self._fold([field[block] for field in fields], first[block])
            for field in fields[1:]:
                field[block] = first[block]
        slots.meet(REDUCE)
        slots.require_present()

    def _reduce_by_reads(self, flat: Array, places: Sequence[Location]) -> None:
        """Fold this rank's share in its field, and read the others' from theirs.

        Each of three barriers ends what the others may do with a field: before the second they read
        their shares of it, before the third the result.
        """
        slots, place = self._slots, self._slots.place
        shares = [self._slots.share(flat.size, at) for at in range(self._nranks)]
        behind = [(place + at) % self._nranks for at in range(1, self._nranks)]
        # No two ranks begin to read at the same process.
        sources = {rank: self._source(rank, places[rank]) for rank in behind}
        self._fold_by_reads(flat, shares[place], sources)
        slots.meet(REDUCE)
        own, step = address_of(flat), _MAX_READ_NBYTES
        for rank, source in sources.items():
            begin, end = (self._itemsize * at for at in (shares[rank].start, shares[rank].stop))
            for at in range(begin, end, step):
                self._read(rank, source, at, own + at, min(step, end - at))
        slots.meet(REDUCE)
        slots.require_present()

    def _fold_by_reads(
        self, flat: Array, share: slice, sources: Mapping[int, tuple[int, int]]
    ) -> None:
        """Put the result of a share into the field, block by block."""
        place, step = self._slots.place, _READ_NBYTES // self._itemsize
        if self._blocks is None:
            self._blocks = np.empty((self._nranks, step), self._dtype)
        into = [address_of(block) for block in self._blocks]
        for at in range(share.start, share.stop, step):
            mine = flat[at : min(at + step, share.stop)]
            operands = [block[: mine.size] for block in self._blocks]
            for rank, source in sources.items():
                self._read(rank, source, at * self._itemsize, into[rank], mine.nbytes)
            operands[place] = mine
            # The first two operands are combined first: either may be the result, no other.
            result = operands[place if place < 2 else 0]
            self._fold(operands, result)
            if result is not mine:
                mine[...] = result

    def _source(self, rank: int, place: Location) -> tuple[int, int]:
        """Return the process, and the address in it, where this one reads a rank's field."""
        if place.window:  # mapped here
            return os.getpid(), self._segment(place).address + place.offset
        return self._peers.pids[self._ranks[rank]], place.offset

    def _read(
        self, rank: int, source: tuple[int, int], offset: int, into: int, nbytes: int
    ) -> None:
        pid, address = source
        error = read_memory(pid, address + offset, into, nbytes)
        if error:
            self._peers.require_read(f"{self._slots.name}: reduce", self._ranks[rank], error)


def _is_readable(address: int, nbytes: int) -> bool:
    """Whether other processes can read a packed field: memory of a driver they cannot.

    It was allocated at once, so that a byte at either end stands for all.
    """
    return ReadTrial(2).at(np.array([0, nbytes - 1], np.uint64), address)

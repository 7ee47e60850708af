"""Route ``host``: the receiver reads the sender's cells out of shared memory.

A sender says where its fields are and then that they are ready (`published`); each receiver copies
what it wants and says so (`taken`). A field that lives in a window of the node is read where it is,
one copy in all; any other is packed into memory that the plan's ranks have in common. There are two
packed copies in turn, so that a sender waits for a slow receiver only when it is two exchanges
ahead; fields that are read in place may be overwritten after `wait`, which therefore waits for all
their readers.
"""

from __future__ import annotations

import ctypes
import weakref
from os import sched_yield
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.counters import LINE
from mpishare.errors import ClosedError
from mpishare.halo.own import Own
from mpishare.halo.shelves import Shelves
from mpishare.order import LOOKS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.halo.layout import Layout
    from mpishare.halo.message import Message, Part
    from mpishare.halo.ranks import Ranks

    Array = np.ndarray[Any, Any]

_PUBLISHED, _TAKEN = 0, LINE
_PLACES = 2 * LINE
_PLACE_WORDS = 3  # number of the window or 0, rank of the segment, offset in bytes
_WORTH_NBYTES = 16 << 10  # below, a packed copy costs less than to wait for all its readers
_KEPT = 64  # arrays whose place is remembered


class HostRoute:
    """The messages of one plan between ranks of a node. Collective, host-blocking.

    Parameters
    ----------
    ranks : Ranks
        The plan's.
    name : str
        The plan's, for errors.
    layouts : sequence of list of Layout
        For each rank of the plan, its fields'.
    sends, recvs : sequence of Message
        What goes by this route, this rank's own included.
    told : sequence
        For each rank of the plan, `Message.as_data` of what it sends, and the route.
    land : callable
        Puts cells that came in where they belong: ``land(array, key, cells)``.
    is_direct : bool
        Whether fields in windows may be read in place.
    """

    def __init__(
        self,
        ranks: Ranks,
        name: str,
        layouts: Sequence[Sequence[Layout]],
        sends: Sequence[Message],
        recvs: Sequence[Message],
        told: Sequence[Any],
        land: Callable[[Array, Any, Array], None],
        *,
        is_direct: bool,
    ) -> None:
        self._ranks = ranks
        self._name = name
        self._ground = ranks.ground
        self._layouts = layouts
        self._land = land
        self._is_direct = is_direct
        self._sync = ranks.ground.agreement.block.sync
        self._patience = ranks.ground.patience
        self._epoch = 0
        self._reads_me = sorted({message.peer for message in sends} - {ranks.rank})
        self._is_read_in_place = False
        self._found: dict[int, tuple[Any, int, tuple[int, int, int] | None]] = {}
        self._seen: dict[tuple[int, int, int, int, int], Array] = {}
        nwords = _PLACES + 2 * _PLACE_WORDS * len(layouts[ranks.rank])
        self._shelves = Shelves(ranks, name, nwords, told)
        self.staging_nbytes = self._shelves.nbytes
        self._words = self._shelves.words
        self._mine = self._words[ranks.rank]
        try:
            ranks.step(name, lambda: self._lay_out(sends, recvs, told))
        except BaseException:
            self.close()
            raise

    def _lay_out(
        self, sends: Sequence[Message], recvs: Sequence[Message], told: Sequence[Any]
    ) -> None:
        """Find everything that a call uses. Local."""
        ranks = self._ranks
        nfields = len(self._layouts[ranks.rank])
        dtypes = [layout.carrier for layout in self._layouts[ranks.rank]]

        def packed(part: Part, sender: int, receiver: int, tag: int) -> list[Array]:
            return self._shelves.copies(part, sender, receiver, tag, dtypes[part.field])

        # By field: (what to index, the two packed copies).
        self._packs: list[list[tuple[Any, list[Array]]]] = [[] for _ in range(nfields)]
        for message in sends:
            for part in message.parts if message.peer != ranks.rank else ():
                copies = packed(part, ranks.rank, message.peer, message.tag)
                self._packs[part.field].append((part.key, copies))
        boxes = {
            (rank, tag, field): box
            for rank in ranks.team
            for peer, tag, parts, _ in told[rank]
            if peer == ranks.rank
            for field, _, box in parts
        }
        own = {
            (m.tag, part.field): part.key for m in sends for part in m.parts if m.peer == ranks.rank
        }
        # By message: (sender, [(field, where it goes, where it is in the sender's field, copies)]).
        self._takes: list[tuple[int, list[tuple[int, Any, Any, list[Array]]]]] = []
        own_lands_first = self._land is put  # in any order, so also all at once
        for message in recvs:
            if own_lands_first and message.peer == ranks.rank:
                continue
            parts: list[tuple[int, Any, Any, list[Array]]] = []
            for part in message.parts:
                if message.peer == ranks.rank:
                    parts.append((part.field, part.key, own[message.tag, part.field], []))
                else:
                    box = boxes[message.peer, message.tag, part.field]
                    source = None if box is None else tuple(map(slice, *box))
                    copies = packed(part, message.peer, ranks.rank, message.tag)
                    parts.append((part.field, part.key, source, copies))
            self._takes.append((message.peer, parts))
        self._own: Own | None = None
        if own_lands_first:
            mine = [m for m in recvs if m.peer == ranks.rank]
            self._own = Own(
                [(p.field, p.key, own[m.tag, p.field]) for m in mine for p in m.parts],
                [part.shape for message in mine for part in message.parts],
                [dtype.itemsize for dtype in dtypes],
            )
        # A field of which some part is no box is never read in place: only its owner knows where.
        whole_boxes = [True] * nfields
        for rank in ranks.team:
            for _, _, given, _ in told[rank]:
                for field, _, box in given:
                    whole_boxes[field] = whole_boxes[field] and box is not None
        largest = [0] * nfields
        for message in sends:
            for part in message.parts if message.peer != ranks.rank else ():
                largest[part.field] = max(largest[part.field], part.nbytes)
        self._in_place = [
            self._is_direct and is_box and nbytes >= _WORTH_NBYTES
            for is_box, nbytes in zip(whole_boxes, largest, strict=True)
        ]

    def start(self, arrays: Sequence[Array]) -> None:
        """Say where my fields are, or pack them; waits only for a rank two exchanges behind."""
        epoch, mine = self._epoch + 1, self._mine
        self._until("start", self._reads_me, _TAKEN, epoch - 2)
        turn = epoch & 1
        at = _PLACES + turn * _PLACE_WORDS * len(arrays)
        is_read_in_place = False
        for field, array in enumerate(arrays):
            place = self._place(array, field) if self._in_place[field] else None
            if place is None:
                mine[at] = 0
                for key, copies in self._packs[field]:
                    copies[turn][...] = array[key]
            else:
                mine[at], mine[at + 1], mine[at + 2] = place
                is_read_in_place = True
            at += _PLACE_WORDS
        self._is_read_in_place = is_read_in_place
        self._publish(epoch)
        self._epoch = epoch

    def wait(self, arrays: Sequence[Array]) -> None:
        """Copy what the others send, and wait until nobody reads my fields any more."""
        epoch = self._epoch
        turn = epoch & 1
        if self._own is not None:
            self._own.copy(arrays)
        for peer, parts in self._takes:
            if peer != self._ranks.rank:
                self._until("wait", (peer,), _PUBLISHED, epoch)
            for field, key, source, copies in parts:
                array = arrays[field]
                if not copies:
                    self._land(array, key, array[source])
                    continue
                theirs = self._theirs(peer, field, turn)
                self._land(array, key, copies[turn] if theirs is None else theirs[source])
        self._sync()
        self._mine[_TAKEN] = epoch
        if self._is_read_in_place:
            self._until("wait", self._reads_me, _TAKEN, epoch)

    def close(self) -> None:
        """Unmap. Local, once all ranks are done."""
        self._words, self._mine = {}, memoryview(b"").cast("Q")
        self._packs, self._takes = [], []
        self._seen.clear()
        self._shelves.close()

    def _publish(self, epoch: int) -> None:
        self._sync()
        self._mine[_PUBLISHED] = epoch

    def _until(self, call: str, ranks: Sequence[int], word: int, epoch: int) -> None:
        """Wait until a word of each rank has reached an epoch."""
        words, looks = self._words, 0
        for rank in ranks:
            theirs = words[rank]
            while theirs[word] < epoch:
                looks += 1
                if looks > LOOKS:
                    self._ranks.wait(
                        f"{self._name}: {call}",
                        lambda: [each for each in ranks if words[each][word] < epoch],
                    )
                elif not looks % self._patience:
                    sched_yield()
        self._sync()

    def _place(self, array: Array, field: int) -> tuple[int, int, int] | None:
        """Return in which window of the node my array is: its number, the segment, the offset."""
        version = self._ground.windows_version
        known = self._found.get(id(array))
        if known is not None and known[0]() is array and known[1] == version:
            return known[2]
        address = array.__array_interface__["data"][0]
        place = None
        for number, window in self._ground.windows.items():
            found = window.find(address, self._layouts[self._ranks.rank][field].span_nbytes)
            if found is not None:
                place = number, *found
        if len(self._found) >= _KEPT:
            self._found.clear()
        # By a weak reference: an array that is gone may have its number taken by another.
        self._found[id(array)] = weakref.ref(array), version, place
        return place

    def _theirs(self, peer: int, field: int, turn: int) -> Array | None:
        """Return a sender's field, if it can be read in place."""
        words = self._words[peer]
        at = _PLACES + _PLACE_WORDS * (turn * len(self._in_place) + field)
        number, segment, offset = words[at], words[at + 1], words[at + 2]
        if not number:
            return None
        window = self._ground.windows.get(number)
        if window is None:
            raise ClosedError(
                f"{self._name}: wait failed: window {number}, which it reads, is closed"
            )
        known = self._seen.get((peer, field, number, segment, offset))
        if known is None:
            layout = self._layouts[peer][field]
            start = window.address_of(segment) + offset
            # Without a hold on the mapping, which a window could not give back then; after its
            # close nobody names its number again.
            cells = (ctypes.c_char * layout.span_nbytes).from_address(start)
            known = np.ndarray(
                layout.shape, layout.carrier, buffer=memoryview(cells), strides=layout.strides
            )
            if len(self._seen) >= _KEPT:
                self._seen.clear()
            self._seen[peer, field, number, segment, offset] = known
        return known


def put(array: Array, key: Any, cells: Array) -> None:
    """Overwrite cells with those that came in."""
    array[key] = cells


def add(array: Array, key: Any, cells: Array) -> None:
    """Add the cells that came in, one after the other where a cell is named twice."""
    if all(isinstance(item, slice) for item in key):
        target = array[key]
        np.add(target, cells, out=target)
    else:
        np.add.at(array, key, cells)

"""Route ``host``: the receiver reads the sender's cells out of shared memory.

A sender says where its fields are and then that they are ready (`published`); each receiver copies
what it wants and says so (`taken`). A field that lives in a window of the node is read where it is,
one copy in all, and so are large faces of any other where they are lent; the rest is packed into
memory that the plan's ranks have in common. There are two packed copies in turn, so that a sender
waits for a slow receiver only when it is two exchanges ahead; fields that are read in place may be
overwritten after `wait`, which therefore waits for all their readers.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from mpishare.coordination.control_block import State
from mpishare.coordination.counters import SLOT_WORDS
from mpishare.halo.host.copies import WHOLE, Call, Own, cells_at, moving, put, within
from mpishare.halo.host.process_read import PeerReads
from mpishare.halo.host.staging import DoubleBuffer
from mpishare.ordering.counter_ops import spin_until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.halo.host.copies import Array, Copy, Land, Move
    from mpishare.halo.host.process_read import Key
    from mpishare.halo.layout import Layout
    from mpishare.halo.message import Message, Part
    from mpishare.halo.plan_comm import PlanComm

_PUBLISHED, _TAKEN = 0, SLOT_WORDS
_PLACES = 2 * SLOT_WORDS
_PLACE_WORDS = 3  # number of the window, rank of the segment, offset in bytes
_PACKED, _PRIVATE = 0, 1 << 63  # instead of a number; of a private field the offset is its address
_WORTH_NBYTES = 16 << 10  # below, a packed copy costs less than to wait for all its readers
_KEPT = 64  # calls that are remembered, and places of a neighbor for each


class HostRoute:
    """The messages of one plan between ranks of a node. Collective, host-blocking.

    Parameters
    ----------
    ranks : PlanComm
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
        Whether fields may be read in place.
    """

    def __init__(
        self,
        ranks: PlanComm,
        name: str,
        layouts: Sequence[Sequence[Layout]],
        sends: Sequence[Message],
        recvs: Sequence[Message],
        told: Sequence[Any],
        land: Land,
        *,
        is_direct: bool,
    ) -> None:
        self._ranks = ranks
        self._name = name
        self._context = ranks.context
        self._layouts = layouts
        self._land = land
        self._is_direct = is_direct
        self._sync = ranks.context.memory_barrier
        self._spins_per_yield = ranks.context.spins_per_yield
        self._epoch = 0
        self._reads_me = sorted({message.peer for message in sends} - {ranks.rank})
        self._calls: dict[tuple[int, ...], Call] = {}
        self._stamp = 0
        nwords = _PLACES + 2 * (1 + _PLACE_WORDS * len(layouts[ranks.rank]))
        self._lent = PeerReads(ranks, name, layouts, told if is_direct else ())
        self._shelves = DoubleBuffer(ranks, name, nwords, told, self._lent.keys)
        self._words = self._shelves.words
        self._mine = self._words[ranks.rank]
        self._readers = [self._words[rank] for rank in self._reads_me]
        try:
            ranks.step(name, lambda: self._lay_out(sends, recvs, told))
        except BaseException:
            self.close()
            raise
        self.staging_nbytes = self._shelves.nbytes + self._lent.nbytes

    def _lay_out(
        self, sends: Sequence[Message], recvs: Sequence[Message], told: Sequence[Any]
    ) -> None:
        """Find everything that calls have in common. Local."""
        ranks = self._ranks
        self._lent.lay_out(recvs)
        nfields = len(self._layouts[ranks.rank])
        dtypes = [layout.carrier for layout in self._layouts[ranks.rank]]

        def packed(part: Part, sender: int, receiver: int, tag: int) -> list[Array]:
            if (sender, receiver, tag, part.field) in self._lent.keys:
                return []
            return self._shelves.copies(part, sender, receiver, tag, dtypes[part.field])

        # (field, what to index, the two packed copies; none of what is lent)
        self._packs = [
            (part.field, part.key, packed(part, ranks.rank, message.peer, message.tag))
            for message in sends
            for part in message.parts
            if message.peer != ranks.rank
        ]
        boxes = {
            (rank, tag, field): box
            for rank in ranks.ranks_here
            for peer, tag, parts, _ in told[rank]
            if peer == ranks.rank
            for field, _, box in parts
        }
        own = {
            (m.tag, part.field): part.key for m in sends for part in m.parts if m.peer == ranks.rank
        }
        self._own: list[Copy] = []
        if self._land is put:  # in any order: own cells first, then one neighbor after the other
            mine = [m for m in recvs if m.peer == ranks.rank]
            self._own = Own(
                [(p.field, p.key, own[m.tag, p.field]) for m in mine for p in m.parts],
                [part.shape for message in mine for part in message.parts],
                [dtype.itemsize for dtype in dtypes],
            ).copies
            others = [message for message in recvs if message.peer != ranks.rank]
            recvs = sorted(others, key=lambda message: message.peer)
        # By sender: (its rank, its words, its parts), and of a part
        # (what names it, where it goes, where it is in the sender's field, copies).
        self._takes: list[tuple[int, memoryview[int], list[tuple[Key, Any, Any, list[Array]]]]] = []
        for peer, messages in groupby(recvs, key=lambda message: message.peer):
            parts: list[tuple[Key, Any, Any, list[Array]]] = []
            for message in messages:
                for part in message.parts:
                    key = peer, ranks.rank, message.tag, part.field
                    if peer == ranks.rank:
                        parts.append((key, part.key, own[message.tag, part.field], []))
                    else:
                        box = boxes[peer, message.tag, part.field]
                        source = None if box is None else box.slices()
                        copies = packed(part, peer, ranks.rank, message.tag)
                        parts.append((key, part.key, source, copies))
            self._takes.append((peer, self._words[peer], parts))
        # A field of which some part is no box is never read in place: only its owner knows where.
        whole_boxes = [True] * nfields
        for rank in ranks.ranks_here:
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

    def prepare(self, addresses: tuple[int, ...]) -> Call:
        """Return what a call does with fields at these addresses. Local.

        It is made once for them, and again where a window was opened or closed since.
        """
        version = self._context.windows_version
        known = self._calls.get(addresses)
        if known is not None and known.version == version:
            return known
        call = Call(version)
        layouts = self._layouts[self._ranks.rank]
        call.arrays = arrays = list(map(cells_at, addresses, layouts))
        for field, address in enumerate(addresses):
            span_nbytes = layouts[field].span_nbytes
            place: tuple[int, int, int] | None = (
                self._context.locate(address, span_nbytes) if self._in_place[field] else None
            )
            shadow = None
            if place is None and field in self._lent.fields:
                address, shadow = self._lent.place(field, address)
                place = _PRIVATE, 0, address
            call.places += place or (_PACKED,) * _PLACE_WORDS
            if place is not None and not call.stamp:
                self._stamp += 1
                call.stamp = self._stamp
            for packed, key, copies in self._packs:
                if packed == field and (place is None or place[0] == _PRIVATE):
                    for turn, copy in enumerate(copies):
                        call.packs[turn].append(moving(put, copy, WHOLE, arrays[field], key))
                    if not copies and shadow is not None:
                        for packs in call.packs:
                            packs.append(moving(put, shadow, key, arrays[field], key))
        call.own = [move for field, to, of in self._own for move in within(arrays[field], to, of)]
        if len(self._calls) >= _KEPT:
            self._calls.clear()
        self._calls[addresses] = call
        return call

    def start(self, call: Call) -> None:
        """Say where my fields are, or pack them; waits only for a rank two exchanges behind."""
        epoch, mine = self._epoch + 1, self._mine
        for words in self._readers:
            if words[_TAKEN] < epoch - 2:
                self._until("start", self._reads_me, _TAKEN, epoch - 2)
        self._sync()
        turn = epoch & 1
        for move in call.packs[turn]:
            move()
        at = _PLACES + turn * (1 + len(call.places))
        if mine[at] != call.stamp:
            for place, word in enumerate(call.places, at + 1):
                mine[place] = word
            mine[at] = call.stamp
        self._publish(epoch)
        self._epoch = epoch

    def wait(self, call: Call) -> None:
        """Copy what the others send, and wait until nobody reads my fields any more."""
        epoch, known = self._epoch, call.takes
        turn = epoch & 1
        at = _PLACES + turn * (1 + len(call.places))
        for move in call.own:
            move()
        if call.version != self._context.windows_version:
            known.clear()  # and where a window that is closed now was read, raise
        for number, (peer, words, parts) in enumerate(self._takes):
            if words[_PUBLISHED] < epoch:
                self._until("wait", (peer,), _PUBLISHED, epoch)
            self._sync()
            moves = known.get((number, turn, words[at]))
            if moves is None:
                if len(known) >= _KEPT * len(self._takes):
                    known.clear()
                moves = self._taking(call, peer, parts, turn)
                known[number, turn, words[at]] = moves
            for move in moves:
                move()
            if words[at]:
                self._require_present(peer)
        self._sync()
        self._mine[_TAKEN] = epoch
        if call.stamp:
            for words in self._readers:
                if words[_TAKEN] < epoch:
                    self._until("wait", self._reads_me, _TAKEN, epoch)
            self._sync()

    def close(self) -> None:
        """Unmap. Local, once all ranks are done."""
        self._words, self._mine = {}, memoryview(b"").cast("Q")
        self._packs, self._takes, self._readers = [], [], []
        self._calls.clear()
        self._lent.close()
        self._shelves.close()

    def _publish(self, epoch: int) -> None:
        self._sync()
        self._mine[_PUBLISHED] = epoch

    def _until(self, call: str, ranks: Sequence[int], word: int, epoch: int) -> None:
        """Wait until a word of each rank has reached an epoch."""
        words = self._words
        for rank in ranks:
            theirs = words[rank]
            if not spin_until(theirs, word, epoch, self._spins_per_yield):
                self._ranks.wait(
                    f"{self._name}: {call}",
                    lambda: [each for each in ranks if words[each][word] < epoch],
                )

    def _require_present(self, peer: int) -> None:
        """Raise if a rank whose field was read in place is gone: it may have changed the cells."""
        self._sync()
        if self._context.agreement.state(self._ranks.ranks_here[peer]) != State.PRESENT:
            self._ranks.wait(f"{self._name}: wait", lambda: [peer])  # raises, with its reasons

    def _taking(self, call: Call, peer: int, parts: Any, turn: int) -> list[Move]:
        """Return the moves of a call that take what a rank sends this time."""
        words = self._words[peer]
        at = _PLACES + turn * (1 + len(call.places))
        moves = []
        for name, key, source, copies in parts:
            field = name[3]
            array = call.arrays[field]
            if peer == self._ranks.rank:
                moves.append(moving(self._land, array, key, array, source))
                continue
            place = at + 1 + _PLACE_WORDS * field
            number = _PACKED
            if words[at]:
                number, segment, offset = words[place : place + _PLACE_WORDS]
            if number == _PRIVATE and not copies:
                moves += self._lent.taking(name, offset, array)
                continue
            if number in (_PACKED, _PRIVATE):
                moves.append(moving(self._land, array, key, copies[turn], WHOLE))
                continue
            address = self._context.segment_address(number, segment) + offset
            theirs = cells_at(address, self._layouts[peer][field])
            moves.append(moving(self._land, array, key, theirs, source))
        return moves

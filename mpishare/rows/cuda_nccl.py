"""Rows in GPU memory that NCCL takes to ranks of other nodes, on a stream.

NCCL must be told how long a message is, at both ends, before the GPU knows how many rows there are.
So a message is a header and a whole slot, whatever comes. Where more rows come than that, the hosts
of both ranks see the same number, and make the same larger slots: after a migration before their
next call, else in `wait`, where the message is sent once more. A graph has the places of slots:
from the first capture on they stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishare.plans.gpu.nccl import NcclPeers
from mpishare.rows import records

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from mpishare.backends import StreamInfo
    from mpishare.backends.nccl import Move
    from mpishare.plans.engine import RoutedSetup


class NcclRows:
    """The rows of the keys at some places. Collective to make over the plan, host-blocking."""

    def __init__(self, engine: Any, setup: RoutedSetup, places: Collection[int]) -> None:
        self._engine, self._slots, self._context = engine, engine.slots, setup.context
        self._keys = {place: engine.form.keys[place] for place in places}
        ranks = sorted({key.rank for key in self._keys.values()})
        self.peers = NcclPeers(setup.comm, setup.name, setup.full_call, ranks)
        self._backend: Any = setup.context.backend
        self._words: dict[int, memoryview[int]] = {}  # how many rows went and came, if too many
        self._events: list[Any] = []
        # Whether slots are in graphs, and whether the host has yet to look at what came.
        self._is_fixed = self._is_unseen = False

    def make_slots(self) -> None:
        """Have memory for messages, once the table is made."""
        slots = self._slots
        for place in self._keys:
            self._words[place] = slots.offer(self._engine.rank, place)
            begin = int(slots.keys[place]["mine"]) + records.HEADER_NBYTES + slots.slot
            self._send_from(place, begin, 1)
        slots.table["begun"], slots.table["done"] = slots.flags.begun, slots.flags.done
        self._send = self._bind(self._keys, self._keys)
        self._events += [self._backend.local_event() for _ in range(3)]
        self._packed, self._came, self._seen = self._events

    def _send_from(self, place: int, address: int, scale: int) -> None:
        self._slots.keys[place]["theirs"] = address
        self._slots.set(place, address + records.HEADER_NBYTES, 0, scale)

    def _bind(self, sends: Collection[int], recvs: Collection[int]) -> Callable[[int], None]:
        """Return the messages of some keys: those between two ranks are in the order of tags."""
        keys, slots, room = self._keys, self._slots, self._engine.form.room

        def move(place: int, end: str, scale: int) -> Move:
            nbytes = records.HEADER_NBYTES + scale * slots.slot
            return int(slots.keys[place][end]), nbytes, keys[place].rank

        sends = sorted(sends, key=lambda at: keys[at].tag)
        recvs = sorted(recvs, key=lambda at: keys[at].far_tag)
        return self.peers.ranks.bind(
            [move(at, "theirs", slots.rooms[at] // room) for at in sends],
            [move(at, "mine", slots.scales[at]) for at in recvs],
        )

    def begin(self, entered: StreamInfo) -> None:
        """Begin a call that sends, before it packs."""
        self._is_fixed |= entered[3]
        if self._is_unseen and not self._is_fixed and any(self._grow("start", entered)):
            self._slots.publish(entered[0])

    def send(self, entered: StreamInfo) -> None:
        """Send what was packed beside what follows on the stream of the call."""
        if not self._keys:
            return
        handle, _, _, is_captured = entered
        own = self._engine._stream, self._engine, True, is_captured
        self._backend.order(self._packed, handle, own[0])
        self._engine._in_order(lambda: self._send(own[0]), own)
        self._backend.record(self._came, own[0])

    def trade(self, entered: StreamInfo) -> None:
        """Let the stream wait for the rows; the host too, unless those of a migration may stay."""
        handle, engine = entered[0], self._engine
        self._backend.wait_event(self._came, handle)
        self._is_unseen = True
        if self._is_fixed or not engine.is_open:
            return
        engine.enqueue(entered, engine.poll_all)
        self.end(entered)
        sends, recvs = self._grow("wait", entered)
        if sends or recvs:
            self._slots.publish(handle)
            engine.pack_again(sum(1 << place for place in sends), handle)
            messages = self._bind(sends, recvs)
            engine._in_order(lambda: messages(handle), entered)

    def end(self, entered: StreamInfo) -> None:
        """Note where the stream has all that came."""
        if self._is_unseen and not self._is_fixed:
            self._backend.record(self._seen, entered[0])

    def _grow(self, call: str, entered: StreamInfo) -> tuple[list[int], list[int]]:
        """Make larger slots for the last call's rows; return the keys that sent, and received."""
        slots, backend, words = self._slots, self._backend, self._words
        call = f"{self._engine.name}: {call}"
        self._context.wait_until(lambda: backend.is_event_done(self._seen), call)
        self._is_unseen = False
        slots.held.clear()  # the stream is past these
        room = self._engine.form.room
        recvs = [at for at in words if words[at][records.NEEDED] > slots.scales[at] * room]
        sends = [at for at in words if words[at][records.GOES] > slots.rooms[at]]
        for place in recvs:
            slots.enlarge(place, words[place][records.NEEDED], is_needed=True)
            key, now = slots.keys[place], slots.bases[place]
            # The next migration reads in the last header what it may send.
            backend.copy(now, int(key["mine"]), records.HEADER_NBYTES, entered[0])
            key["mine"], key["mine_rows"] = now, now + records.HEADER_NBYTES
        for place in sends:
            scale = slots.scale_for(words[place][records.GOES])
            self._send_from(place, slots.take_slots(scale).address, scale)
        if sends or recvs:
            self._send = self._bind(self._keys, self._keys)
        return sends, recvs

    def close(self) -> None:
        """Destroy the events, once no call is under way."""
        self._backend.close_events(self._events)
        self._events.clear()

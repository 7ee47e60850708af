"""Sums given back by the kernel that adds.

Parts are cut, alike at both ends, so that all cells of one have the same copies. Of a cell with one
copy both ranks send their number and add the other's. If there are more, the owner gets them, adds
them in their order and sends the sum.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mpishare.errors import grouped
from mpishare.plans.cells import Box, meet
from mpishare.plans.exchange.cuda.records import GET_LL, PACK, PUT_LL, UNPACK
from mpishare.plans.exchange.cuda.regions import are_boxes, regions_of, source_of
from mpishare.plans.message import Part, PartInfo, PartKey, received, sent
from mpishare.runtime.route import COPY, FUSED

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mpishare.plans.engine import RoutedSetup
    from mpishare.plans.exchange.cuda.buffers import Buffers
    from mpishare.plans.exchange.cuda.direction import Direction
    from mpishare.plans.exchange.cuda.work_items import Source, WorkList
    from mpishare.plans.layout import FieldLayout
    from mpishare.plans.message import Message


def in_one_kernel(setup: RoutedSetup) -> RoutedSetup | None:
    """Return the setup of an exchange both ways by one kernel; None on all ranks if it takes two.

    Collective, host-blocking.
    """
    for rank, routes in enumerate(setup.routes):
        others = {route for peer, route in routes.items() if peer != rank}
        if others != {FUSED} or routes.get(rank, COPY) is not COPY:
            return None
    mine = setup.my_sends, setup.my_recvs
    are_fit = setup.comm.step(setup.name, lambda: are_boxes(*mine) and _are_apart(*mine))
    return _cut(setup).both_ways() if all(are_fit) and not setup.wire else None


def _are_apart(sends: Sequence[Message], recvs: Sequence[Message]) -> bool:
    """Whether no cell arrives twice, or is sent on."""
    boxes: Iterator[dict[int, list[Any]]] = (
        grouped((part.field, part.box) for message in messages for part in message.parts)
        for messages in (sends, recvs)
    )
    owned, ghosts = boxes
    return all(
        meet(each, each + owned.get(field, [])).sum() == len(each) for field, each in ghosts.items()
    )


def _cut(setup: RoutedSetup) -> RoutedSetup:
    """Return a setup whose parts have the same cells of their owner, or none in common."""
    places: dict[Any, list[Box]] = defaultdict(list)  # in each part
    for owner, messages in enumerate(setup.sends):
        for field in range(len(setup.layouts[owner])):
            parts = [
                ((owner, message.peer, message.tag, number), part.box)
                for message in messages
                for number, part in enumerate(message.parts)
                if part.field == field and part.box is not None
            ]
            for region, numbers in regions_of(tuple(box for _, box in parts)):
                for key, box in (parts[number] for number in numbers):
                    places[key].append(region.seen_from(box.lower))

    def cut(part: Any, layouts: Sequence[FieldLayout], near: Box) -> Any:
        box = near.seen_from([-at for at in part.box.lower])
        found = Part.of_box(part.field, layouts[part.field], box)
        return found if isinstance(part, Part) else PartInfo(found.field, found.nbytes, box)

    def of_rank(messages: Sequence[Any], rank: int, *, are_sent: bool) -> list[Any]:
        found = []
        for message in messages:
            ends = (rank, message.peer) if are_sent else (message.peer, rank)
            numbered = enumerate(message.parts)
            nears = ((part, places[*ends, message.tag, number]) for number, part in numbered)
            parts = [cut(part, setup.layouts[rank], near) for part, all_ in nears for near in all_]
            found.append(message._replace(parts=tuple(parts)))
        return found

    mine = setup.comm.rank
    return replace(
        setup,
        my_sends=of_rank(setup.my_sends, mine, are_sent=True),
        my_recvs=of_rank(setup.my_recvs, mine, are_sent=False),
        sends=[of_rank(each, rank, are_sent=True) for rank, each in enumerate(setup.sends)],
        recvs=[of_rank(each, rank, are_sent=False) for rank, each in enumerate(setup.recvs)],
    )


class Copies:
    """Puts what a rank does for all copies of its cells into a list of work."""

    def __init__(self, direction: Direction, buffers: Buffers, work: WorkList) -> None:
        self.direction, self.buffers, self.work = direction, buffers, work
        self.sent = dict(sent(direction.sends, direction.rank))
        self.received = dict(received(direction.recvs, direction.rank))

    def add(self) -> None:
        """Add all of them. An item waits for those before it, or for its like on another rank."""
        rank, work = self.direction.rank, self.work
        work.give_back()
        groups = [*self._groups()]
        of_more = [keys for keys in groups if keys[0].sender != rank and len(keys) > 1]
        ghosts = [key for keys in of_more for key in keys if key.receiver == rank]
        for key in ghosts:
            self._put(self._back(key))
        for keys in groups:
            if keys[0].sender == rank:
                self._add_owned(keys)
            elif len(keys) == 1 and keys[0].receiver == rank:
                self._swap(self._back(keys[0]), keys[0])
        for key in ghosts:
            part, slot = self.received[key], self.buffers.slot(key, self.received[key])
            work.add_copy(UNPACK if slot.flags else GET_LL, part, slot)

    def _groups(self) -> Iterator[list[PartKey]]:
        """Yield the parts to all copies of the same cells, in the same order on all ranks."""
        for owner, messages in enumerate(self.direction.messages):
            there = [each for each in messages if each.tag < self.direction.reverse_tag]
            copies = grouped(((part.field, part.box), key) for key, part in sent(there, owner))
            yield from copies.values()

    def _add_owned(self, keys: Sequence[PartKey]) -> None:
        others = [key for key in keys if key.receiver != key.sender]
        if len(keys) == len(others) == 1:
            self._swap(keys[0], self._back(keys[0]))
            return
        part = self.sent[keys[0]]
        with self.work.one_block():
            self.work.add_region(part, [self._source(self._back(key), part) for key in keys])
            for key in others:
                self._put(key)

    def _swap(self, there: PartKey, here: PartKey) -> None:
        """Send the cells of a part, and add those that come from its other end."""
        part, source = self.sent[there], self._source(here, self.sent[there])
        slot = self.buffers.slot(there, part)
        if not slot.flags:
            self.work.add_region(part, [source], slot)
            return
        with self.work.one_block():
            self._put(there)
            self.work.add_region(part, [source])

    def _put(self, key: PartKey) -> None:
        part = self.sent[key]
        slot = self.buffers.slot(key, part)
        self.work.add_copy(PACK if slot.flags else PUT_LL, part, slot)

    def _source(self, key: PartKey, part: Part) -> Source:
        whole = Box((0,) * len(part.shape), part.shape)
        return source_of(self.direction, self.buffers, key, part, whole)

    def _back(self, key: PartKey) -> PartKey:
        """Return the key of the same cells on their way to the owner."""
        tag = self.direction.reverse_tag + key.tag
        return PartKey(key.receiver, key.sender, tag, key.field, key.number)

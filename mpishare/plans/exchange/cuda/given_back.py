"""Sums given back by the kernel that adds.

Parts are cut, alike at both ends, so that all cells of one have the same copies. Of a cell with one
copy both ranks send their number and add the other's. If there are more, the owner gets them, adds
them in their order and sends the sum.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mpishare.plans.cells import Box, meet
from mpishare.plans.exchange.cuda.records import GET_LL, PUT_LL
from mpishare.plans.exchange.cuda.regions import are_boxes, regions_of, source_of
from mpishare.plans.exchange.cuda.work_items import Slot, Source, uses_ll
from mpishare.plans.message import Part, PartInfo, PartKey, received, sent
from mpishare.runtime.route import COPY, FUSED

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mpishare.plans.engine import RoutedSetup
    from mpishare.plans.exchange.cuda.buffers import Buffers
    from mpishare.plans.exchange.cuda.direction import Direction
    from mpishare.plans.exchange.cuda.work_items import WorkList
    from mpishare.plans.layout import FieldLayout
    from mpishare.plans.message import Message, MessageInfo


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
    if setup.wire or not all(are_fit):
        return None
    cut = _cut(setup)
    return cut.both_ways() if all(map(_are_small, range(setup.comm.size), cut.sends)) else None


def _are_small(owner: int, messages: Sequence[MessageInfo]) -> bool:
    """Whether all sums are small that an owner sends to one of several copies."""
    parts = [(message.peer, part) for message in messages for part in message.parts]
    copies = Counter((part.field, part.box) for _, part in parts)
    return all(
        peer == owner or copies[part.field, part.box] == 1 or uses_ll(part.nbytes)
        for peer, part in parts
    )


def _are_apart(sends: Sequence[Message], recvs: Sequence[Message]) -> bool:
    """Whether no cell arrives twice, or is sent on."""
    boxes: tuple[dict[int, list[Any]], ...] = defaultdict(list), defaultdict(list)
    for found, messages in zip(boxes, (sends, recvs), strict=True):
        for part in (part for message in messages for part in message.parts):
            found[part.field].append(part.box)
    owned, ghosts = boxes
    return all(meet(each, each + owned[field]).sum() == len(each) for field, each in ghosts.items())


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
        groups = [*self._groups()]
        of_more = [keys for keys in groups if keys[0].sender != rank and len(keys) > 1]
        ghosts = [key for keys in of_more for key in keys if key.receiver == rank]
        for key in ghosts:
            self._put(self._back(key))
        for keys in groups:
            if keys[0].sender == rank:
                self._add_owned(keys)
            elif len(keys) == 1 and keys[0].receiver == rank:
                part, there = self.received[keys[0]], self._back(keys[0])
                sources = [self._source(keys[0], part), self._own(part)]
                work.add_copies(part, sources, self.buffers.slot(there, part))
        for key in ghosts:
            work.add_copy(GET_LL, self.received[key], self.buffers.slot(key, self.received[key]))

    def _groups(self) -> Iterator[list[PartKey]]:
        """Yield the parts to all copies of the same cells, in the same order on all ranks."""
        for owner, messages in enumerate(self.direction.messages):
            copies: dict[Any, list[PartKey]] = defaultdict(list)
            for message in messages:
                if message.tag < self.direction.reverse_tag:
                    for number, part in enumerate(message.parts):
                        key = PartKey(owner, message.peer, message.tag, part.field, number)
                        copies[part.field, part.box].append(key)
            yield from copies.values()

    def _add_owned(self, keys: Sequence[PartKey]) -> None:
        """Add what comes to the owner, the rank itself, and send the sum, or the cells to one."""
        part, rank = self.sent[keys[0]], self.direction.rank
        if len(keys) == 1 and keys[0].receiver != rank:
            sources = [self._own(part), self._source(self._back(keys[0]), part)]
            self.work.add_copies(part, sources, self.buffers.slot(keys[0], part))
            return
        sources = [self._source(self._back(key), part) for key in keys]
        for at, key in enumerate(keys):
            if key.receiver != rank:
                sources[at] = sources[at]._replace(put=self.buffers.slot(key, part))
        self.work.add_copies(part, [self._own(part), *sources])

    def _put(self, key: PartKey) -> None:
        self.work.add_copy(PUT_LL, self.sent[key], self.buffers.slot(key, self.sent[key]))

    def _own(self, part: Part) -> Source:
        shares_gpu = self.direction.shares_gpu(self.direction.rank)
        layout = self.direction.layouts[part.field]
        return Source(part, layout, part.nbytes, Slot(0, shares_gpu=shares_gpu))

    def _source(self, key: PartKey, part: Part) -> Source:
        whole = Box((0,) * len(part.shape), part.shape)
        return source_of(self.direction, self.buffers, key, part, whole)

    def _back(self, key: PartKey) -> PartKey:
        """Return the key of the same cells on their way to the owner."""
        tag = self.direction.reverse_tag + key.tag
        return PartKey(key.receiver, key.sender, tag, key.field, key.number)

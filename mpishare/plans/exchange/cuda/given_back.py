"""Sums given back by the kernel that adds: every rank that has a cell is part of one chain for it.

Parts are cut, alike at both ends, so that all cells of one have the same copies. Of a cell with one
copy both ranks send their number and add the other's. If there are more, the owner gets them, adds
them in their order and sends the sum.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mpishare.plans.cells import Box, meet
from mpishare.plans.exchange.cuda.records import GET_LL, PACK, PUT_LL, UNPACK
from mpishare.plans.exchange.cuda.regions import adds_in_kernel, regions_of, source_of
from mpishare.plans.message import Part, PartInfo, PartKey, received, sent
from mpishare.runtime.route import COPY, FUSED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.plans.engine import RoutedSetup
    from mpishare.plans.exchange.cuda.buffers import Buffers
    from mpishare.plans.exchange.cuda.direction import Direction
    from mpishare.plans.exchange.cuda.work_items import WorkList
    from mpishare.plans.message import Message


def in_one_kernel(setup: RoutedSetup) -> RoutedSetup | None:
    """Return the setup of an exchange both ways by one kernel; None on all ranks if it takes two.

    Collective, host-blocking.
    """
    for rank, routes in enumerate(setup.routes):
        others = {route for peer, route in routes.items() if peer != rank}
        if routes and (others != {FUSED} or routes.get(rank, COPY) is not COPY):
            return None
    if not adds_in_kernel(setup.turned(adds=True)):
        return None
    if not all(setup.comm.step(setup.name, lambda: _are_apart(setup.my_sends, setup.my_recvs))):
        return None
    return _cut(setup).both_ways()


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

    def of_part(part: Any, layouts: Sequence[Any], near: Box) -> Any:
        box = near.seen_from([-at for at in part.box.lower])
        cut = Part.of_box(part.field, layouts[part.field], box)
        return cut if isinstance(part, Part) else PartInfo(cut.field, cut.nbytes, box)

    def of_rank(rank: int, messages: Sequence[Any], *, are_sent: bool) -> list[Any]:
        found = []
        for message in messages:
            ends = (rank, message.peer) if are_sent else (message.peer, rank)
            parts = [
                of_part(part, setup.layouts[rank], near)
                for number, part in enumerate(message.parts)
                for near in places[*ends, message.tag, number]
            ]
            found.append(message._replace(parts=tuple(parts)))
        return found

    return replace(
        setup,
        my_sends=of_rank(setup.comm.rank, setup.my_sends, are_sent=True),
        my_recvs=of_rank(setup.comm.rank, setup.my_recvs, are_sent=False),
        sends=[of_rank(rank, each, are_sent=True) for rank, each in enumerate(setup.sends)],
        recvs=[of_rank(rank, each, are_sent=False) for rank, each in enumerate(setup.recvs)],
    )


class Chains:
    """Puts the chains of one rank into a list of work, in the order of all ranks."""

    def __init__(self, direction: Direction, buffers: Buffers, work: WorkList) -> None:
        self.direction, self.buffers, self.work = direction, buffers, work
        self.sent = dict(sent(direction.sends, direction.rank))
        self.received = dict(received(direction.recvs, direction.rank))

    def add(self) -> None:
        """Add them, owner by owner."""
        direction = self.direction
        for owner, messages in enumerate(direction.messages):
            copies: dict[Any, list[PartKey]] = defaultdict(list)
            for message in messages:
                if message.tag < direction.reverse_tag:
                    for number, part in enumerate(message.parts):
                        key = PartKey(owner, message.peer, message.tag, part.field, number)
                        copies[part.field, part.box].append(key)
            for keys in copies.values():
                if owner == direction.rank:
                    self._add_owned(keys)
                elif here := [key for key in keys if key.receiver == direction.rank]:
                    self._add_ghosts(here, is_only=len(keys) == 1)

    def _add_owned(self, keys: Sequence[PartKey]) -> None:
        rank, first = self.direction.rank, self.sent[keys[0]]
        others = [key for key in keys if key.receiver != rank]
        is_pair = len(keys) == len(others) == 1
        self.work.begin_chain()
        if is_pair:
            self._put(others[0])
        self._add(first, [*map(self._back, keys)])
        for key in keys:
            if key.receiver == rank:
                shares_gpu = self.direction.shares_gpu(rank)
                self.work.add_local(first, self.received[key], shares_gpu=shares_gpu)
            elif not is_pair:
                self._put(key)

    def _add_ghosts(self, keys: Sequence[PartKey], *, is_only: bool) -> None:
        self.work.begin_chain()
        for key in keys:
            self._put(self._back(key))
        for key in keys:
            ghosts, slot = self.received[key], self.buffers.slot(key, self.received[key])
            if is_only:
                self._add(ghosts, [key])
            else:
                self.work.add_copy(UNPACK if slot.flags else GET_LL, ghosts, slot)

    def _put(self, key: PartKey) -> None:
        part = self.sent[key]
        slot = self.buffers.slot(key, part)
        self.work.add_copy(PACK if slot.flags else PUT_LL, part, slot)

    def _add(self, part: Part, keys: Sequence[PartKey]) -> None:
        whole = Box((0,) * len(part.shape), part.shape)
        ends = self.direction, self.buffers
        self.work.add_region(part, [source_of(*ends, key, part, whole) for key in keys])

    def _back(self, key: PartKey) -> PartKey:
        """Return the key of the same cells on their way to the owner."""
        tag = self.direction.reverse_tag + key.tag
        return PartKey(key.receiver, key.sender, tag, key.field, key.number)

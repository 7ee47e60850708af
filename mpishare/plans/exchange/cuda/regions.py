"""Sums by the fused kernel: the regions of a field to whose cells the same parts are added."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING

from mpishare.plans.exchange.cuda.work_items import Slot, Source, packed_layout
from mpishare.plans.message import Part
from mpishare.runtime.route import COPY, FUSED, LOCAL, PINNED

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mpishare.plans.cells import Box
    from mpishare.plans.engine import RoutedSetup
    from mpishare.plans.exchange.cuda.buffers import Buffers
    from mpishare.plans.exchange.cuda.direction import Direction
    from mpishare.plans.message import Message, PartKey

# Of a field: regions are found in a time that grows with the square of the boxes.
_MAX_BOXES = 64


def adds_in_kernel(setup: RoutedSetup) -> bool:
    """Whether the fused kernel adds what comes back, on all ranks. Collective, host-blocking.

    It adds boxes as they are. Where streams move cells within a node, too, sums of both would have
    no order.
    """
    routes = {
        route
        for rank, routes in enumerate(setup.routes)
        for peer, route in routes.items()
        if peer != rank
    }
    if setup.gives_back:
        return True  # of parts that were such boxes before they were cut
    if not setup.adds or setup.wire or FUSED not in routes or routes & {COPY, PINNED}:
        return False
    return all(setup.comm.step(setup.name, lambda: are_boxes(setup.my_sends, setup.my_recvs)))


def added_regions(direction: Direction, buffers: Buffers) -> Iterator[tuple[Part, list[Source]]]:
    """Yield the regions of this rank's fields, each with its sources in the order of the sums."""
    received = [*direction.received(FUSED, LOCAL)]
    for field, layout in enumerate(direction.layouts):
        parts = [each for each in received if each[1].field == field]
        boxes = tuple(part.box for _, part in parts if part.box is not None)
        for region, numbers in regions_of(boxes):
            places = [(*parts[number], region.seen_from(boxes[number].lower)) for number in numbers]
            sources = [source_of(direction, buffers, *place) for place in places]
            yield Part.of_box(field, layout, region), sources


def source_of(
    direction: Direction, buffers: Buffers, key: PartKey, part: Part, near: Box
) -> Source:
    """Return where a box of a part that arrives lies: packed, or in this rank's own ghosts."""
    layout, slot = direction.layouts[part.field], Slot(0)
    if key.sender == direction.rank:
        slot = slot._replace(shares_gpu=direction.shares_gpu(direction.rank))
        near = near.seen_from([-each.start for each in direction.own[key].key])
    else:
        layout, slot = packed_layout(part, layout.dtype.itemsize), buffers.slot(key, part)
    return Source(Part.of_box(part.field, layout, near), layout, part.nbytes, slot)


def are_boxes(sends: Sequence[Message], recvs: Sequence[Message]) -> bool:
    """Whether all parts are plain boxes, and few of them are added to one field."""
    parts = [part for message in (*sends, *recvs) for part in message.parts]
    added = Counter(part.field for message in recvs for part in message.parts)
    return all(
        part.box is not None and part.is_plain and part.far is None for part in parts
    ) and all(count <= _MAX_BOXES for count in added.values())


@lru_cache(maxsize=64)
def regions_of(boxes: tuple[Box, ...]) -> list[tuple[Box, tuple[int, ...]]]:
    """Return disjoint boxes, each with the numbers of the boxes that have its cells."""
    found: list[tuple[Box, tuple[int, ...]]] = []
    for number, box in enumerate(boxes):
        before, found, rest = found, [], [box]
        for region, numbers in before:
            common = region & box
            if not common.size:
                found.append((region, numbers))
                continue
            found.append((common, (*numbers, number)))
            found += [(each, numbers) for each in region.outside(common)]
            rest = [each for part in rest for each in part.without(common)]
        found += [(each, (number,)) for each in rest]
    return found

"""Parts that are stored straight into the ghosts of another rank on the same GPU.

Through staging each byte is read and written twice, and within a GPU memory is the limit, not a
link. So large parts are stored into the receiver's field where that is in a window, which the
sender maps. At each exchange the receiver signals by a flag that its ghosts may be written, and
whether the field of this call is the one in the window; else the sender uses the staging buffer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishare.errors import ClosedError
from mpishare.plans.message import Part, PartKey, parts_sent
from mpishare.runtime.route import FUSED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.plans.cells import Box
    from mpishare.plans.engine import RoutedSetup
    from mpishare.plans.layout import FieldLayout
    from mpishare.plans.message import MessageInfo

MIN_NBYTES = 4 << 20
"""Least size of a direct part: for smaller ones the wait for a flag takes longer than a copy."""


class DirectParts:
    """The keys of the parts that are stored straight into ghosts, the same on all ranks."""

    def __init__(self, setup: RoutedSetup, messages: Sequence[Sequence[MessageInfo]]) -> None:
        self._held: list[Any] = []
        uuids, ranks_here = setup.context.uuids, setup.comm.ranks_here
        is_any_in_window = any(place for places in setup.locations for place in places)
        boxes = _boxes_received(setup) if is_any_in_window else {}
        self._boxes: dict[PartKey, Box] = {}
        for key, info, _ in parts_sent(messages, ranks_here, FUSED):
            box = boxes.get(key)
            is_near = uuids[ranks_here[key.sender]] == uuids[ranks_here[key.receiver]]
            is_in_window = setup.locations[key.receiver][key.field] is not None
            if is_near and is_in_window and box is not None and info.nbytes >= MIN_NBYTES:
                self._boxes[key] = box
        self.keys = set(self._boxes)
        self._setup = setup

    def ghosts(self, key: PartKey) -> tuple[Part, FieldLayout, int]:
        """Return cells, layout and mapped address of the field that a part is stored into.

        It stays mapped here until `close`, even after its window is closed.
        """
        setup = self._setup
        place = setup.locations[key.receiver][key.field]
        memory = place and setup.context.segment_memory(place.window, place.rank)
        if place is None or memory is None:
            raise ClosedError(f"the window in which rank {key.receiver} has its field is closed")
        layout = setup.layouts[key.receiver][key.field]
        self._held.append(memory.array((memory.nbytes,), "u1"))
        part = Part.of_box(key.field, layout, self._boxes[key])
        return part, layout, memory.address + place.offset

    def close(self) -> None:
        """Drop all references."""
        self._held = []


def _boxes_received(setup: RoutedSetup) -> dict[PartKey, Box]:
    """Return the boxes that the ranks of this node receive into."""
    return {
        PartKey(message.peer, receiver, message.tag, part.field): part.box
        for receiver in setup.comm.ranks_here
        for message in setup.recvs[receiver]
        for part in message.parts
        if part.box is not None
    }

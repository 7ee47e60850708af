"""One direction of a plan on CUDA: its messages and their routes, without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishare.errors import ClosedError
from mpishare.plans.message import Part, PartKey, parts_sent, received, sent
from mpishare.plans.wire import narrowed
from mpishare.runtime.route import COPY, FUSED, LOCAL

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mpishare.plans.cells import Box
    from mpishare.plans.engine import RoutedSetup
    from mpishare.plans.layout import FieldLayout
    from mpishare.plans.message import Message, MessageInfo
    from mpishare.runtime.route import Route


MIN_NBYTES = 4 << 20
"""Least size of a direct part: for smaller ones the wait for a flag takes longer than a copy."""


class Direction:
    """This rank's messages in one direction, and their routes.

    `adds_in_kernel`: as that of `regions.py`, if the direction adds.
    """

    def __init__(self, setup: RoutedSetup, *, adds_in_kernel: bool = False) -> None:
        comm, context = setup.comm, setup.context
        self.rank, self.ranks_here = comm.rank, list(comm.ranks_here)
        self.layouts, self.layouts_by_rank = setup.mine, setup.layouts
        self.adds, self.wire = setup.adds, setup.wire
        self.packs = setup.adds or setup.wire is not None  # what arrives is not what is stored

        self.sends = narrowed(setup.my_sends, setup.mine, setup.wire)
        self.recvs = narrowed(setup.my_recvs, setup.mine, setup.wire)
        uuids = context.all_uuids
        # Ranks of other nodes on this machine count too.
        self.ranks_per_gpu = uuids.count(uuids[context.rank])
        # Ranks of the plan on this node that share their GPU.
        self.sharing = {r for r, place in comm.ranks_here.items() if uuids.count(uuids[place]) > 1}
        self.gives_back, self.reverse_tag = setup.gives_back, setup.reverse_tag
        if self.sharing and self.gives_back:
            self.sharing = {*comm.ranks_here}  # one chunk has the same cells on all ranks

        def directed(rank: int, peer: int, route: Route) -> Route:
            if setup.adds and not adds_in_kernel:
                return route.in_order
            # A rank adds its own ghosts by the kernel that adds those of others, if any.
            is_local = not setup.adds or FUSED in setup.routes[rank].values()
            return LOCAL if route is COPY and peer == rank and is_local else route

        self.routes = [
            {peer: directed(rank, peer, route) for peer, route in routes.items()}
            for rank, routes in enumerate(setup.routes)
        ]
        self.mine = self.routes[self.rank]
        self.messages: list[list[MessageInfo]] = [
            [
                info._replace(route=self.routes[rank][info.peer])
                for info in narrowed(infos, setup.layouts[rank], setup.wire)
            ]
            for rank, infos in enumerate(setup.sends)
        ]
        # The bytes of the elements that are transposed, of one size in a plan.
        sizes = [layout.dtype.itemsize for layouts in setup.layouts for layout in layouts]
        self.tiled = max(sizes, default=0)
        self.direct = DirectParts(setup, self.messages)
        self.own = dict(self.sent(LOCAL))

    @property
    def has_fused(self) -> bool:
        return FUSED in self.mine.values()

    @property
    def is_streamed(self) -> bool:
        """Whether an exchange is more than one fused kernel: other routes, or no neighbors."""
        return not self.has_fused or bool(set(self.mine.values()) - {FUSED, LOCAL})

    def peers(self, *routes: Route) -> list[int]:
        """Return the other ranks on these routes."""
        return [p for p, route in self.mine.items() if route in routes and p != self.rank]

    def by(self, *routes: Route) -> tuple[list[Message], list[Message]]:
        """Return this rank's messages that take one of these routes: those sent and received."""
        sends, recvs = (
            [message for message in messages if self.mine[message.peer] in routes]
            for messages in (self.sends, self.recvs)
        )
        return sends, recvs

    def sent(self, *routes: Route) -> Iterator[tuple[PartKey, Part]]:
        """Yield the parts to send by these routes, to this rank itself too."""
        return sent(self.by(*routes)[0], self.rank)

    def received(self, *routes: Route) -> Iterator[tuple[PartKey, Part]]:
        """Yield the parts to receive by these routes."""
        return received(self.by(*routes)[1], self.rank)

    def local(self) -> Iterator[tuple[Part, Part]]:
        """Yield the parts that this rank sends to itself, each with its destination."""
        if self.mine.get(self.rank) is LOCAL:
            to = {message.tag: message for message in self.recvs if message.peer == self.rank}
            for message in self.sends:
                if message.peer == self.rank:
                    yield from zip(message.parts, to[message.tag].parts, strict=True)

    def shares_gpu(self, peer: int) -> bool:
        """Whether this rank or a peer shares its GPU with other ranks of the node."""
        return self.rank in self.sharing or peer in self.sharing


class DirectParts:
    """The parts that are stored straight into the ghosts of another rank on the same GPU.

    Through staging each byte is read and written twice, and within a GPU memory is the limit, not a
    link. So large parts are stored into the receiver's field where that is in a window, which the
    sender maps. At each exchange the receiver signals by a flag that its ghosts may be written, and
    whether the field of this call is the one in the window; else the sender uses the staging
    buffer.

    `keys` are the same on all ranks.
    """

    def __init__(self, setup: RoutedSetup, messages: Sequence[Sequence[MessageInfo]]) -> None:
        self._held: list[Any] = []
        uuids, ranks_here = setup.context.uuids, setup.comm.ranks_here
        is_any_in_window = any(place for places in setup.locations for place in places)
        # What is rounded on the way, or added, goes through staging.
        is_stored = is_any_in_window and not (setup.wire or setup.adds)
        boxes = _boxes_received(setup) if is_stored else {}
        self._boxes = {
            key: boxes[key]
            for key, info in parts_sent(messages, ranks_here if boxes else (), FUSED)
            if key in boxes
            and info.nbytes >= MIN_NBYTES
            and uuids[ranks_here[key.sender]] == uuids[ranks_here[key.receiver]]
            and setup.locations[key.receiver][key.field] is not None
        }
        self.keys = self._boxes.keys()
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
        self._held = []


def _boxes_received(setup: RoutedSetup) -> dict[PartKey, Box]:
    return {
        PartKey(message.peer, receiver, message.tag, part.field, number): part.box
        for receiver in setup.comm.ranks_here
        for message in setup.recvs[receiver]
        for number, part in enumerate(message.parts)
        if part.box is not None and part.is_plain and part.far is None
    }

"""One direction of a plan on CUDA: its messages and their routes, without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpishare.halo.cuda.direct import DirectParts
from mpishare.plans.message import received, sent
from mpishare.runtime.route import COPY, FUSED, LOCAL

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mpishare.plans.engine import RoutedSetup
    from mpishare.plans.message import Message, MessageInfo, Part, PartKey
    from mpishare.runtime.route import Route


class Direction:
    """This rank's messages in one direction, and their routes."""

    def __init__(
        self,
        setup: RoutedSetup,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        *,
        is_reverse: bool,
    ) -> None:
        comm, context = setup.comm, setup.context
        self.rank, self.ranks_here = comm.rank, list(comm.ranks_here)
        self.layouts, self.layouts_by_rank = setup.mine, setup.layouts
        self.sends, self.recvs, self.is_reverse = sends, recvs, is_reverse
        uuids = context.all_uuids
        # Ranks of other nodes on this machine count too.
        self.ranks_per_gpu = uuids.count(uuids[context.rank])
        # Ranks of the plan on this node that share their GPU.
        self.sharing = {r for r, place in comm.ranks_here.items() if uuids.count(uuids[place]) > 1}

        def directed(rank: int, peer: int, route: Route) -> Route:
            if is_reverse:  # sums keep an order, which one kernel cannot
                return route.in_order
            return LOCAL if route is COPY and peer == rank else route

        self.routes = [
            {peer: directed(rank, peer, route) for peer, route in routes.items()}
            for rank, routes in enumerate(setup.routes)
        ]
        self.mine = self.routes[self.rank]
        self.messages: list[list[MessageInfo]] = [
            [info._replace(route=self.routes[rank][info.peer]) for info in infos]
            for rank, infos in enumerate(setup.messages_by_rank(is_reverse=is_reverse))
        ]
        self.direct = DirectParts(setup, self.messages)

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

    def by(self, messages: Sequence[Message], *routes: Route) -> list[Message]:
        """Return those of this rank's messages that take one of these routes."""
        return [message for message in messages if self.mine[message.peer] in routes]

    def sent(self, *routes: Route) -> Iterator[tuple[PartKey, Part]]:
        """Yield the parts to send by these routes, to this rank itself too."""
        return sent(self.by(self.sends, *routes), self.rank)

    def received(self, *routes: Route) -> Iterator[tuple[PartKey, Part]]:
        """Yield the parts to receive by these routes."""
        return received(self.by(self.recvs, *routes), self.rank)

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

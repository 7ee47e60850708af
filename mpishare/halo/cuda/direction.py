"""One direction of a plan on CUDA: its messages, and the route of each. No GPU is used here.

All of it follows from what the ranks said of a plan, so plans alike share one.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from mpishare.halo.cuda.direct import DirectParts
from mpishare.halo.cuda.staging import StagingLayout, pinned_layout, staging_layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mpishare.halo.cuda.fused_items import MovableItems
    from mpishare.halo.engine import PlanSetup
    from mpishare.halo.message import Message, MessageInfo, Part, PartKey


class Direction:
    """What this rank sends and receives in one direction, and how. Local.

    Parameters
    ----------
    setup, sends, recvs, is_reverse
        As for `CudaEngine`.

    Attributes
    ----------
    routes : list of dict of int to str
        For each rank, its route to each peer; ``local`` for a rank's own cells. The reverse uses
        ``copy`` for ``fused``: sums keep an order, which one kernel cannot.
    mine : dict of int to str
        Those of this rank.
    messages : list of list of MessageInfo
        For each rank, what it sends, with these routes.
    sharing : set of int
        The plan's ranks on this node that share their GPU with another rank.
    direct : DirectParts
        The parts that may go straight into ghosts on the same GPU.
    ranks_per_gpu : int
        How many ranks use this rank's GPU, those of other nodes on this machine too.
    fused_items : dict of tuple of int to MovableItems
        For each alignment of the fields, the work items of an earlier plan.
    """

    def __init__(
        self,
        setup: PlanSetup,
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
        self.ranks_per_gpu = uuids.count(uuids[context.rank])
        self.sharing = {r for r, place in comm.ranks_here.items() if uuids.count(uuids[place]) > 1}

        def directed(rank: int, peer: int, route: str) -> str:
            if is_reverse:
                return "copy" if route == "fused" else route
            return "local" if route == "copy" and peer == rank else route

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
        self.fused_items: dict[tuple[int, ...], MovableItems] = {}

    @cached_property
    def staging(self) -> dict[int, StagingLayout]:
        """The layouts of the staging buffers of this rank and of its neighbors on GPUs."""
        ranks = self.rank, *self.peers("fused", "copy")
        given = self.messages, self.routes, self.ranks_here
        return {
            rank: staging_layout(*given, rank, self.sharing, self.direct.keys) for rank in ranks
        }

    @cached_property
    def pinned(self) -> tuple[dict[PartKey, int], int]:
        """The layout of the parts in the node's pinned host memory, and its size."""
        return pinned_layout(self.messages, self.ranks_here)

    @property
    def has_fused(self) -> bool:
        """Whether this rank has fused neighbors."""
        return "fused" in self.mine.values()

    @property
    def is_streamed(self) -> bool:
        """Whether an exchange is more than one fused kernel: other routes, or no neighbors."""
        return not self.has_fused or bool(set(self.mine.values()) - {"fused", "local"})

    def peers(self, *routes: str) -> list[int]:
        """Return the other ranks that are reached by these routes."""
        return [p for p, route in self.mine.items() if route in routes and p != self.rank]

    def outgoing(self, *routes: str) -> Iterator[tuple[Message, Part]]:
        """Yield the parts that are sent by these routes, to this rank itself too."""
        for message in self.sends:
            if self.mine[message.peer] in routes:
                for part in message.parts:
                    yield message, part

    def incoming(self, *routes: str) -> Iterator[tuple[Message, Part]]:
        """Yield the parts that are received by these routes."""
        for message in self.recvs:
            if self.mine[message.peer] in routes:
                for part in message.parts:
                    yield message, part

    def local(self) -> Iterator[tuple[Part, Part]]:
        """Yield the parts that this rank sends to itself, each with its destination."""
        if self.mine.get(self.rank) == "local":
            to = {message.tag: message for message in self.recvs if message.peer == self.rank}
            for message in self.sends:
                if message.peer == self.rank:
                    yield from zip(message.parts, to[message.tag].parts, strict=True)

    def shares_gpu(self, peer: int) -> bool:
        """Whether this rank or a peer shares its GPU with other ranks of the node."""
        return self.rank in self.sharing or peer in self.sharing

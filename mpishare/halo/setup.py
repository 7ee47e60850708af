"""What the ranks of a plan agree on before a cell moves: the fields, the node, the routes."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.coordination.agreement import require_same
from mpishare.coordination.mpi_agreement import agree
from mpishare.halo import layout, routes
from mpishare.halo.cuda.work_items import unit_of
from mpishare.halo.layout import Layout, as_list, as_numpy
from mpishare.halo.node_cache import context_of, node_of, patience
from mpishare.halo.plan_comm import PlanComm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi4py import MPI

    from mpishare.context import NodeContext
    from mpishare.halo.message import Message
    from mpishare.halo.node_cache import NodeCache
    from mpishare.node import Node
    from mpishare.ordering.stream_chain import StreamChain


@dataclass
class PlanSetup:
    """What was agreed on.

    Attributes
    ----------
    call, name : str
        What was called, and what the plan is called.
    fields : list of arrays
        Those that the plan is made with.
    on_gpu : bool
        Where they are, on all ranks.
    layouts : list of list of Layout
        For each rank, its fields'.
    described : list of dict
        For each rank, what `describe` returned.
    chain : StreamChain or None
        What puts the calls on the plan in order on CUDA.
    sends, recvs : list of list
        For each rank, what it sends and receives: `Message.as_data` and the route.
    routes : list of dict of int to str
        For each rank, its route to each peer.
    units : dict of (sender, receiver, tag, field) to int, bytes
        On CUDA, for each part what both of its ends can move at once.
    """

    call: str
    name: str
    node: Node
    context: NodeContext
    ranks: PlanComm
    fields: list[Any]
    on_gpu: bool
    layouts: list[list[Layout]]
    described: list[dict[str, Any]]
    same: dict[str, Any]
    cache: NodeCache | None
    chain: StreamChain | None = None
    sends: list[Any] = field(default_factory=list)
    recvs: list[Any] = field(default_factory=list)
    routes: list[dict[int, str]] = field(default_factory=list)
    units: dict[tuple[int, int, int, int], int] = field(default_factory=dict)

    @property
    def backend(self) -> str:
        """Of the fields: ``"cuda"`` or ``"host"``."""
        return "cuda" if self.on_gpu else "host"

    @property
    def mine(self) -> list[Layout]:
        """The layouts of this rank's fields."""
        return self.layouts[self.ranks.rank]

    def match(self, sends: Sequence[Message], recvs: Sequence[Message]) -> None:
        """Choose the routes of messages of which both ends are known to agree. Collective."""
        report = self.node.report()
        peers = [message.peer for message in (*sends, *recvs)]
        forced = self.same["MPISHARE_ROUTE"]

        def choose() -> dict[str, Any]:
            _require_device(self.mine, self.node)
            found = routes.choose(self.ranks, report, peers, forced, on_gpu=self.on_gpu)
            return {
                "routes": [*found.items()],
                "sends": [(*message.as_data(), found[message.peer]) for message in sends],
                "recvs": [(*message.as_data(), found[message.peer]) for message in recvs],
                "units": self._units(sends, recvs) if self.on_gpu else [],
            }

        told = self.ranks.step(self.call, choose)
        self.sends = [each["sends"] for each in told]
        self.recvs = [each["recvs"] for each in told]
        self.routes = [dict(each["routes"]) for each in told]
        for *key, unit in (row for each in told for row in each["units"]):
            sender, receiver, tag, number = key
            part = sender, receiver, tag, number
            self.units[part] = min(unit, self.units.get(part, unit))
        routes.refuse(self.call, self.routes, self.same["require"])
        routes.warn(self.name, self.ranks, report, self.routes)

    def _units(self, sends: Sequence[Message], recvs: Sequence[Message]) -> list[list[int]]:
        mine = self.ranks.rank
        ends = [(mine, each.peer, each) for each in sends]
        ends += [(each.peer, mine, each) for each in recvs]
        return [
            [sender, receiver, message.tag, part.field, unit_of(part, self.mine[part.field])]
            for sender, receiver, message in ends
            for part in message.parts
        ]


def settle(
    comm: MPI.Intracomm,
    whole: MPI.Intracomm,
    call: str,
    fields: Any,
    node: Any,
    require: Any,
    describe: Callable[[list[Layout]], dict[str, Any]],
) -> PlanSetup:
    """Agree on everything but the routes. Collective, host-blocking.

    Parameters
    ----------
    comm, whole : mpi4py.MPI.Intracomm
        The user's, and the plan's own.
    describe : callable
        Returns what else all ranks are told; under ``same``, what must not differ.
    """
    own: list[Any] = []
    layouts: list[Layout] = []

    def look() -> dict[str, Any]:
        own.extend(layout.as_list(fields))
        on_gpu = layout.is_on_gpu(own[0])
        layouts.extend(_layouts(own, on_gpu=on_gpu))
        described = describe(layouts)
        return {
            "same": {
                "fields in": "GPU memory" if on_gpu else "host memory",
                "dtypes": [str(each.dtype) for each in layouts],
                "require": routes.required(require),
                "MPISHARE_ROUTE": routes.forced(),
                **described["same"],
            },
            "layouts": [[each.shape, each.strides] for each in layouts],
            "described": described,
        }

    with patience(node, comm, call) as (timeout_s, check):
        told = agree(whole, call, look, timeout_s, check)
    require_same(call, [each["same"] for each in told], whole.rank)
    on_gpu = layout.is_on_gpu(own[0])
    node, cache = node_of(comm, whole, call, node, "cuda" if on_gpu else "host")
    context = context_of(node)
    return PlanSetup(
        call=call,
        name=f"{call} {context.number(call)}",
        node=node,
        context=context,
        ranks=PlanComm(whole, context, call),
        fields=own,
        on_gpu=on_gpu,
        layouts=[
            [
                Layout(tuple(shape), tuple(strides), mine.dtype, mine.device)
                for (shape, strides), mine in zip(each["layouts"], layouts, strict=True)
            ]
            for each in told
        ],
        described=[each["described"] for each in told],
        same=told[0]["same"],
        cache=cache,
    )


def _require_device(layouts: Sequence[Layout], node: Node) -> None:
    mine = None if node.device is None else node.device.ordinal
    for number, each in enumerate(layouts):
        if each.device is not None and each.device != mine:
            raise ValueError(
                f"field {number} is on GPU {each.device}, the node of this rank uses GPU {mine}"
            )


def _layouts(fields: Sequence[Any], *, on_gpu: bool) -> list[Layout]:
    if on_gpu:
        from mpishare.halo.cuda.fields import cuda_layout

        return [cuda_layout(each, f"field {i}") for i, each in enumerate(fields)]
    return [
        layout.host_layout(layout.as_numpy(each, f"field {i}"), f"field {i}")
        for i, each in enumerate(fields)
    ]


_MOST_WORK = 100_000  # milliseconds; a few steps settle what programs have


def require_disjoint(fields: Any, layouts: Sequence[Layout]) -> None:
    """Raise `ValueError` if an element of one field is one of another, too. Local.

    Components that lie in turns in one array are apart: ``q[..., 0]`` and ``q[..., 1]``.
    """
    if len(layouts) == 1:
        return
    views = [
        _View(address, layout).array()
        for address, layout in zip(_addresses(as_list(fields), layouts), layouts, strict=True)
    ]
    for (first, a), (second, b) in combinations(enumerate(views), 2):
        try:
            # Any bound is taken; the stubs know of two.
            share = np.shares_memory(a, b, max_work=_MOST_WORK)  # type: ignore[arg-type]
        except np.exceptions.TooHardError:
            continue  # refused is only what is known
        if share:
            raise ValueError(
                f"fields {first} and {second} share memory: the ghosts of both would be written. "
                "Name each array once."
            )


def _addresses(fields: Sequence[Any], layouts: Sequence[Layout]) -> Sequence[int]:
    if layouts[0].device is None:
        arrays = [as_numpy(field, "a field") for field in fields]
        return [array.__array_interface__["data"][0] for array in arrays]
    from mpishare.halo.cuda.fields import addresses

    return addresses(fields, layouts)


class _View:
    """Where a field stands, as NumPy sees an array; in GPU memory nothing of it may be read."""

    def __init__(self, address: int, layout: Layout) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": layout.shape,
            "strides": layout.strides,
            "typestr": f"|V{layout.dtype.itemsize}",
        }

    def array(self) -> np.ndarray[Any, Any]:
        """Return it, to be asked for its place alone."""
        return np.asarray(self)

"""What the ranks of a plan agree on before a cell moves: the fields, the node, the routes."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.coordination.agreement import require_same
from mpishare.coordination.mpi_agreement import agree
from mpishare.halo import layout, routes
from mpishare.halo.cuda.work_items import unit_of
from mpishare.halo.engine import PlanSetup
from mpishare.halo.layout import Layout, as_list, as_numpy
from mpishare.halo.message import MessageInfo, PartKey
from mpishare.halo.node_cache import context_of, node_of, patience
from mpishare.halo.plan_comm import PlanComm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi4py import MPI

    from mpishare.halo.message import Message
    from mpishare.node import Node


def agree_on_fields(
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
        comm=PlanComm(whole, context, call),
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


def agree_on_routes(setup: PlanSetup, sends: Sequence[Message], recvs: Sequence[Message]) -> None:
    """Choose the routes of messages whose two ends are known to agree. Collective."""
    report = setup.node.report()
    peers = [message.peer for message in (*sends, *recvs)]
    forced = setup.same["MPISHARE_ROUTE"]

    def choose() -> dict[str, Any]:
        _require_device(setup.mine, setup.node)
        found = routes.choose(setup.comm, report, peers, forced, on_gpu=setup.on_gpu)
        return {
            "routes": [*found.items()],
            "sends": [message.info(found[message.peer]).pack() for message in sends],
            "recvs": [message.info(found[message.peer]).pack() for message in recvs],
            "units": _units(setup, sends, recvs) if setup.on_gpu else [],
        }

    replies = setup.comm.step(setup.call, choose)
    setup.sends = [[MessageInfo.unpack(row) for row in reply["sends"]] for reply in replies]
    setup.recvs = [[MessageInfo.unpack(row) for row in reply["recvs"]] for reply in replies]
    setup.routes = [dict(reply["routes"]) for reply in replies]
    for *key, unit in (row for reply in replies for row in reply["units"]):
        part = PartKey(*key)
        setup.units[part] = min(unit, setup.units.get(part, unit))
    routes.refuse(setup.call, setup.routes, setup.same["require"])
    routes.warn(setup.name, setup.comm, report, setup.routes)


def _units(setup: PlanSetup, sends: Sequence[Message], recvs: Sequence[Message]) -> list[list[int]]:

    rank = setup.comm.rank
    ends = [(rank, each.peer, each) for each in sends]
    ends += [(each.peer, rank, each) for each in recvs]
    return [
        [sender, receiver, message.tag, part.field, unit_of(part, setup.mine[part.field])]
        for sender, receiver, message in ends
        for part in message.parts
    ]


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
    from mpishare.halo.cuda.fields import addresses_of

    return addresses_of(fields, layouts)


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

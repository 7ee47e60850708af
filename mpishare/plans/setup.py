"""The agreements that make a plan: on the fields, the node and the routes, before a cell moves."""

from __future__ import annotations

import functools
import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mpishare.coordination.agreement import is_agreed, require_same
from mpishare.coordination.rank_group import RankGroup
from mpishare.errors import PeerTimeout, name_ranks
from mpishare.plans import gpu_memory, layout, routes
from mpishare.plans.comm import PlanComm
from mpishare.plans.disjoint import Disjoint
from mpishare.plans.engine import AgreedPlan, PlanSetup
from mpishare.plans.layout import FieldLayout, Layout, as_numpy
from mpishare.plans.message import pack_messages, unpack_messages
from mpishare.plans.node_cache import (
    NodeChoice,
    context_of,
    find_node,
    leave_node,
    look_for_node,
    name_plan,
    ranks_left_out,
    require_backend,
    setup_deadline,
)
from mpishare.plans.ranks import ranks_of_plan
from mpishare.runtime import ranges
from mpishare.runtime.context import Location

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    from mpi4py import MPI

    from mpishare.node import Node
    from mpishare.plans.message import Message
    from mpishare.runtime.context import NodeContext

    Description = tuple[dict[str, Any], Any]


_MEMORY = {
    "cuda": "GPU memory",
    "host": "host memory",
    "auto": "no memory yet, but that of the node",
}


@contextmanager
def plan_setup(call: str, given: MPI.Intracomm, node: Any) -> Iterator[PlanSetup]:
    """Yield the setup of a new plan; close it if the plan fails.

    Collective, host-blocking.
    """
    setup = None
    try:
        with setup_deadline(node, given, call) as (timeout_s, monitor):
            group = RankGroup.of(given, call, timeout_s, monitor)
        setup = PlanSetup(call, given, group, node)
        with ranges.span(call):
            yield setup
    except PeerTimeout:
        raise  # ranks are missing, and to free a communicator is collective
    except BaseException as error:
        if not is_agreed(error):  # the others are in the next step
            leave_node(getattr(setup, "node", node), given, call, error)
            raise
        if setup is None:
            raise
        # Every rank comes here, since every step is agreed on.
        setup.close()
        if type(error) in (TypeError, ValueError) and not str(error).startswith(call):
            error.args = (f"{call} failed: {error}",)
        raise


def agree_on_fields(
    setup: PlanSetup,
    fields: Any,
    require: Any,
    describe: Callable[[list[FieldLayout]], Description],
    *,
    is_whole: bool = False,
) -> list[Any]:
    """Agree on the fields, the arguments and the node; return each rank's geometry. Collective.

    `describe` returns, for the layouts of this rank's fields, the arguments that must be the same
    on all ranks, and this rank's geometry. `is_whole`: whether equal descriptions imply equal
    messages.
    """
    given, call, group = setup.given_node, setup.call, setup.group
    arrays: list[Any] = []
    layouts: list[FieldLayout] = []

    def look() -> list[Any]:
        arrays.extend(layout.as_list(fields))
        setup.takes_any = layout.takes_any(arrays)
        if setup.backend == "auto":
            setup.backend = _backend_of(arrays)
        layouts.extend(layouts_of(arrays, setup.backend))
        require_disjoint(arrays, layouts)
        same, geometry = describe(layouts)
        choice, node = look_for_node(group, call, given, setup.backend)
        setup.fields = [] if any(isinstance(each, Layout) for each in arrays) else arrays
        description = {
            "same": {
                "fields in": _MEMORY[setup.backend],
                "dtypes": "any" if setup.takes_any else [_name_of(each.dtype) for each in layouts],
                "require": routes.required(require),
                "MPISHARE_ROUTE": routes.forced(),
                **same,
            },
            "layouts": [[each.shape, each.strides] for each in layouts],
            "geometry": geometry,
            "devices": [each.device for each in layouts],
            "node": None if node is None else context_of(node).nonces[0],
        }
        text = json.dumps(description)
        if node is None:
            return [choice, None, [], False, text]
        here, dropped = ranks_of_plan(group, context_of(node))
        is_plain = not any(_locations(context_of(node), setup.fields, layouts))
        return [choice, here, dropped, is_plain, text]

    with setup_deadline(given, setup.given_comm, call, setup.look) as (timeout_s, monitor):
        replies = group.agree(call, setup.noting(look), timeout_s, monitor)
    choices = [NodeChoice(*choice) for choice, *_ in replies]
    texts = tuple(each[-1] for each in replies)
    agreed = group.said_before.get(texts)
    if agreed is None:
        agreed = AgreedPlan([json.loads(text) for text in texts])
        require_same(call, [each["same"] for each in agreed.descriptions], group.comm.rank)
    setup.same = agreed.descriptions[0]["same"]
    setup.node, setup.cache = find_node(
        group, setup.given_comm, call, given, setup.backend, choices
    )
    require_backend(call, setup.node, setup.backend)
    setup.context = context_of(setup.node)
    follows_node = setup.backend == "auto"
    setup.on_gpu = (setup.node.backend if follows_node else setup.backend) == "cuda"
    setup.name = setup.name or name_plan(call, setup.context, choices)
    setup.comm = PlanComm(group, setup.context, call, [here for _, here, *_ in replies])
    if all(is_plain for *_, is_plain, _ in replies):
        setup.dropped = [dropped for _, _, dropped, *_ in replies]
        if is_whole and None not in [each["node"] for each in agreed.descriptions]:
            setup.agreed = group.remember(texts, agreed)
    device = setup.node.device.ordinal if setup.on_gpu and setup.node.device else None
    setup.layouts = setup.once(
        "layouts",
        lambda: [
            [
                FieldLayout(
                    tuple(shape),
                    tuple(strides),
                    mine.dtype,
                    device if mine.device is None else mine.device,
                )
                for (shape, strides), mine in zip(each["layouts"], layouts, strict=True)
            ]
            for each in agreed.descriptions
        ],
    )
    return [each["geometry"] for each in agreed.descriptions]


def agree_on_routes(
    setup: PlanSetup,
    sends: Sequence[Message],
    recvs: Sequence[Message],
    engine_class: Callable[[PlanSetup], object],
) -> None:
    """Choose the routes of messages whose two ends are known to agree. Collective.

    `engine_class` imports the engine of the plan: what that raises becomes an error of all ranks.
    """
    if "routes" not in setup.agreed.known:
        _choose_routes(setup, sends, recvs, engine_class)
        found = setup.sends, setup.recvs, setup.routes, setup.is_compiled
        setup.agreed.known["routes"] = found
    else:
        setup.comm.close_dropped(setup.dropped)
        found = setup.agreed.known["routes"]
        setup.sends, setup.recvs, setup.routes, setup.is_compiled = found
        setup.locations = [[None] * len(setup.mine)] * setup.comm.size


def _choose_routes(
    setup: PlanSetup,
    sends: Sequence[Message],
    recvs: Sequence[Message],
    engine_class: Callable[[PlanSetup], object],
) -> None:
    report = setup.node.report()
    peers = [message.peer for message in (*sends, *recvs)]
    forced = setup.same["MPISHARE_ROUTE"]

    def choose() -> dict[str, Any]:
        require_device(setup.mine, setup.node)
        engine_class(setup)
        found = routes.choose(setup.comm, report, peers, forced, on_gpu=setup.on_gpu)
        return {
            "routes": [*found.items()],
            "sends": pack_messages(sends, found),
            "recvs": pack_messages(recvs, found),
            "locations": _locations(setup.context, setup.fields, setup.mine),
            "gpu memory": gpu_memory.ask(setup),
            "is compiled": setup.context.compiled is not None,
            "left out": ranks_left_out(setup.comm, setup.given_node),
        }

    replies = setup.comm.begin(setup.call, choose)
    refuse_left_out(setup.call, [reply["left out"] for reply in replies])
    setup.sends = [unpack_messages(reply["sends"]) for reply in replies]
    setup.recvs = [unpack_messages(reply["recvs"]) for reply in replies]
    setup.routes = [dict(reply["routes"]) for reply in replies]
    setup.is_compiled = all(reply["is compiled"] for reply in replies)
    _settle_messages(setup, [reply["gpu memory"] for reply in replies])
    setup.locations = [
        [place and Location(*place) for place in reply["locations"]] for reply in replies
    ]
    routes.refuse(setup.call, setup.routes, setup.same["require"])


def _settle_messages(setup: PlanSetup, answers: Sequence[str | None]) -> None:
    """Send messages out of GPU memory where all nodes can. The same on all ranks."""
    if gpu_memory.settle(setup, answers) == "":
        setup.routes = [
            {peer: routes.out_of_gpu_memory(route) for peer, route in each.items()}
            for each in setup.routes
        ]
        setup.sends, setup.recvs = (
            [
                [info._replace(route=routes.out_of_gpu_memory(info.route)) for info in infos]
                for infos in by_rank
            ]
            for by_rank in (setup.sends, setup.recvs)
        )


def _locations(
    context: NodeContext, fields: Sequence[Any], layouts: Sequence[FieldLayout]
) -> list[Location | None]:
    """Return where this rank's fields lie in windows, for ranks that would store into them."""
    if not fields or layouts[0].device is None:
        return [None] * len(layouts)
    return locations_in_windows(context, _addresses(fields, layouts), layouts)


def locations_in_windows(
    context: NodeContext, addresses: Sequence[int], layouts: Sequence[FieldLayout]
) -> list[Location | None]:
    """Return each field's location in a window; None if other ranks cannot store there.

    Without MPS the ranks of a GPU take turns, and the flag would cost the sender one more turn.
    """
    device, mine = context.backend.device, context.uuids[context.rank]
    if device is None or not device.mps or context.uuids.count(mine) < 2:
        return [None] * len(layouts)
    found = [
        context.locate(address, layout.span_nbytes)
        for address, layout in zip(addresses, layouts, strict=True)
    ]
    return [each if each and context.uuids[each.rank] == mine else None for each in found]


def refuse_left_out(call: str, left_out: Sequence[Sequence[int]]) -> None:
    """Raise on every rank if a given node lacks ranks of its machine; see `ranks_left_out`."""
    for rank, others in enumerate(left_out):
        if others:
            raise ValueError(
                f"{call} failed: the node= of rank {rank} was made without {name_ranks(others)} "
                "of the same machine, so that cells would travel by MPI messages. Make it on a "
                "communicator that has all of them, such as that of the plan"
            )


def require_device(layouts: Sequence[FieldLayout], node: Node) -> None:
    """Raise `ValueError` if a field is on another GPU than this rank's."""
    mine = None if node.device is None else node.device.ordinal
    for number, each in enumerate(layouts):
        if each.device is not None and each.device != mine:
            raise ValueError(
                f"field {number} is on GPU {each.device}, the node of this rank uses GPU {mine}"
            )


@functools.cache
def _name_of(dtype: np.dtype[Any]) -> str:
    """Return the cached name of a dtype: NumPy takes microseconds for it."""
    return str(dtype)


def _backend_of(fields: Sequence[Any]) -> str:
    """Return the backend of the first array; ``"auto"`` if there is none."""
    arrays = [field for field in fields if not isinstance(field, Layout)]
    if not arrays:
        return "auto"
    return "cuda" if layout.is_on_gpu(arrays[0]) else "host"


def layouts_of(fields: Sequence[Any], backend: str) -> list[FieldLayout]:
    """Return the layouts of arrays and of each `Layout`, or raise for fields that cannot travel."""
    return [_layout_of(each, f"field {i}", backend) for i, each in enumerate(fields)]


def _layout_of(field: Any, name: str, backend: str) -> FieldLayout:
    if isinstance(field, Layout):
        return layout.check_layout(field.of_field(), name)
    if backend == "cuda":
        from mpishare.plans.gpu.fields import cuda_layout

        return cuda_layout(field, name)
    return layout.host_layout(as_numpy(field, name), name)


def require_disjoint(fields: Sequence[Any], layouts: Sequence[FieldLayout]) -> None:
    """Raise `ValueError` if two fields share an element: MPI may not receive into both."""
    numbers = [n for n, field in enumerate(fields) if not isinstance(field, Layout)]
    if len(numbers) > 1:
        kept = [layouts[n] for n in numbers]
        Disjoint(kept).require(_addresses([fields[n] for n in numbers], kept), numbers)


def _addresses(fields: Sequence[Any], layouts: Sequence[FieldLayout]) -> Sequence[int]:
    if layouts[0].device is None:
        arrays = [as_numpy(field, "a field") for field in fields]
        return [array.__array_interface__["data"][0] for array in arrays]
    from mpishare.plans.gpu.fields import addresses_of

    return addresses_of(fields, layouts)

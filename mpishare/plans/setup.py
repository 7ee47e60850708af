"""The agreements that make a plan: on the fields, the node and the routes, before a cell moves.

One descent, in which each record is complete when it is made, but for the communicator of the
first, which is that of a node once there is one: `plan_setup` makes a `PlanStart`,
`agree_on_fields` from it `AgreedFields` with their `PlanSetup`, and `agree_on_routes` from that a
`RoutedSetup`.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpishare.coordination.agreement import is_agreed, require_same
from mpishare.coordination.mpi_agreement import require_intracomm
from mpishare.errors import PeerError, PeerTimeout, UnsupportedError, name_ranks
from mpishare.memory.numbers import added_in_c
from mpishare.plans import nccl_choice, node_cache, routes
from mpishare.plans.engine import PlanSetup, RoutedSetup
from mpishare.plans.fields import GivenFields, locations, require_device
from mpishare.plans.layout import FieldLayout, require_word
from mpishare.plans.message import pack_messages, unpack_messages
from mpishare.runtime import ranges
from mpishare.runtime.context import Location
from mpishare.runtime.route import GPU_MESSAGES, MESSAGES, NCCL, ROUTES, forced, why_no_gpu_messages
from mpishare.runtime.stream_chain import StreamChain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mpi4py import MPI

    from mpishare.plans.comm import PlanComm
    from mpishare.plans.message import Message
    from mpishare.plans.node_cache import NewRanks
    from mpishare.runtime.context import NodeContext
    from mpishare.runtime.route import Route


_MEMORY = {
    "cuda": "GPU memory",
    "host": "host memory",
    "auto": "no memory yet, but that of the node",
}


@dataclass
class PlanStart:
    """A plan of which the ranks know each other, and no more yet."""

    call: str  # of the user: ``HaloExchange``
    given_comm: MPI.Intracomm
    given_node: Any  # its context; anything that the user gave
    comm: NewRanks | PlanComm  # what to close if the plan fails
    name: str = ""  # of the plan; numbered by its node if empty
    backend: Any = "auto"  # of the fields; "auto" for that of the first array
    begin: float = field(default_factory=perf_counter)  # seconds


class Description(NamedTuple):
    same: dict[str, Any]  # arguments that must be equal on all ranks
    geometry: Any = None  # for all ranks, as JSON can hold it
    kept: Any = None  # for this rank


class AgreedFields(NamedTuple):
    setup: PlanSetup
    arrays: list[Any]  # of this rank; empty if one of the fields is a `Layout`
    geometry: list[Any]  # by rank
    kept: Any  # of this rank's `Description`


@contextmanager
def plan_setup(
    call: str,
    given: MPI.Intracomm,
    node: Any,
    wanted: str = "comm must be an Intracomm",
    *,
    backend: Any = "auto",
    outer: PlanComm | None = None,
) -> Iterator[PlanStart]:
    """Yield the start of a new plan; give back what its ranks hold if the plan fails.

    Collective, host-blocking. `wanted` is for the error of what is no communicator, `backend` that
    of the fields. A plan that is part of an `outer` one has its ranks.
    """
    node, start = node_cache.context_of(node), None
    require_intracomm(call, given, wanted)
    try:
        comm = outer.for_part() if outer else node_cache.find_comm(node, given, call)
        start = PlanStart(call, given, node, comm, backend=backend)
        with ranges.span(call):
            yield start
    except PeerTimeout:
        raise  # ranks are missing, and to free a communicator is collective
    except BaseException as error:
        if not is_agreed(error):  # the others are in the next step
            node_cache.leave_node(node if start is None else start.comm.context, call, error)
            raise
        if start is None:
            raise
        # Every rank comes here, since every step is agreed on.
        start.comm.close()
        if type(error) in (TypeError, ValueError) and not str(error).startswith(call):
            error.args = (f"{call} failed: {error}",)
        raise


def agree_on_fields(
    start: PlanStart,
    fields: Any,
    require: Any,
    describe: Callable[[GivenFields], Description],
    name: str = "",
) -> AgreedFields:
    """Agree on the fields, the arguments and the node. Collective, host-blocking.

    `name` is that of the one field in errors, where it is not called a field.
    """

    def find() -> tuple[GivenFields, Description]:
        given = GivenFields.of(fields, start.backend, name)
        return given, describe(given)

    return agree_on_found(start, require, find)


def agree_on_found(
    start: PlanStart, require: Any, find: Callable[[], tuple[GivenFields, Description]]
) -> AgreedFields:
    """Agree as `agree_on_fields` on what `find` returns; its errors become errors of all ranks."""
    call = start.call

    def look() -> tuple[tuple[GivenFields, Any], dict[str, Any]]:
        given, described = find()
        choice = node_cache.look_for_node(start.comm, call, start.given_node, given.backend)
        return (given, described.kept), {
            "choice": choice,
            "same": _same(given, require, described),
            "layouts": [
                [each.shape, each.strides, str(each.dtype), each.dtype.itemsize]
                for each in given.layouts
            ],
            "geometry": described.geometry,
        }

    wrong: list[Exception] = []

    def look_and_note() -> Any:
        try:
            return look()
        except Exception as error:
            wrong.append(error)
            raise

    try:
        (given, kept), replies = start.comm.step_keeping(call, look_and_note)
    except PeerError as error:  # others are in another call
        raise (wrong or [error])[0] from None
    finally:
        wrong.clear()  # else a cycle with its traceback would hold the caller's arrays
    require_same(call, [reply["same"] for reply in replies], start.comm.rank)
    return AgreedFields(
        _setup(start, given, replies), given.arrays, [each["geometry"] for each in replies], kept
    )


def _same(given: GivenFields, require: Any, described: Description) -> dict[str, Any]:
    return {
        "fields in": _MEMORY[given.backend],
        "dtypes": "any" if given.takes_any else [str(each.dtype) for each in given.layouts],
        "require": routes.required(require),
        "MPISHARE_ROUTE": forced(),
        **described.same,
    }


def _setup(start: PlanStart, given: GivenFields, replies: Sequence[Any]) -> PlanSetup:
    """Return the setup of agreed fields, on the node of the plan. Collective."""
    call, backend = start.call, given.backend
    choices = [node_cache.NodeChoice(*reply["choice"]) for reply in replies]
    on_node = start.comm = node_cache.comm_on_node(
        start.comm, start.given_comm, call, start.given_node, backend, choices
    )
    context = on_node.context
    if backend == "cuda" and context.backend.name != "cuda":
        raise UnsupportedError(
            f"{call} failed: the fields are in GPU memory, and the node is on the host backend"
        )
    name = start.name or node_cache.name_plan(call, context, choices)
    comm = start.comm = on_node.for_plan()
    on_gpu = (context.backend.name if backend == "auto" else backend) == "cuda"
    replied = [reply["layouts"] for reply in replies]
    return PlanSetup(
        call=call,
        name=name,
        context=context,
        comm=comm,
        on_gpu=on_gpu,
        takes_any=given.takes_any,
        layouts=_layouts(replied, comm.rank, given, context, on_gpu=on_gpu),
        same=replies[0]["same"],
        begin=start.begin,
    )


def _layouts(
    replied: Sequence[Sequence[Any]],
    rank: int,
    given: GivenFields,
    context: NodeContext,
    *,
    on_gpu: bool,
) -> list[list[FieldLayout]]:
    """Return the layouts of all ranks' fields, in memory like this rank's.

    A dtype that this rank has not itself is one of as many bytes: no cells of it come here.
    """
    gpu = context.backend.device
    device = gpu.ordinal if on_gpu and gpu else None
    dtypes = {str(each.dtype): each.dtype for each in given.layouts}
    found = [
        [
            FieldLayout(tuple(shape), tuple(strides), dtypes.get(name) or np.dtype(f"V{n}"), device)
            for shape, strides, name, n in theirs
        ]
        for theirs in replied
    ]
    devices = (device if each.device is None else each.device for each in given.layouts)
    found[rank] = [
        each if each.device == own else replace(each, device=own)
        for each, own in zip(found[rank], devices, strict=True)
    ]
    return found


def begin_plan(
    setup: PlanSetup, engine_class: Callable[[PlanSetup], object], work: Callable[[], Any] = int
) -> list[Any]:
    """Do the first step of a plan on its node; return the results of all ranks. Collective.

    `engine_class` imports the engine of the plan: what that raises becomes an error of all ranks.
    """

    def step() -> list[Any]:
        require_device(setup.mine, setup.context)
        for each in setup.mine if setup.on_gpu else ():  # a `Layout` was in no memory until now
            require_word(each)
        engine_class(setup)
        return [node_cache.ranks_left_out(setup.comm), work()]

    replies = setup.comm.begin(setup.call, step)
    refuse_left_out(setup.call, [left_out for left_out, _ in replies])
    return [found for _, found in replies]


def refuse_left_out(call: str, left_out: Sequence[Sequence[int]]) -> None:
    """Raise on every rank if a given node lacks ranks of its machine; see `ranks_left_out`."""
    for rank, others in enumerate(left_out):
        if others:
            raise ValueError(
                f"{call} failed: the node= of rank {rank} was made without {name_ranks(others)} "
                "of the same machine, so that cells would travel by MPI messages. Make it on a "
                "communicator that has all of them, such as that of the plan"
            )


def agree_on_routes(
    setup: PlanSetup,
    arrays: Sequence[Any],
    sends: Sequence[Message],
    recvs: Sequence[Message],
    engine_class: Callable[[PlanSetup], object],
    outer: RoutedSetup | None = None,
    *,
    is_staged: bool = False,
) -> RoutedSetup:
    """Choose the routes of messages whose two ends are known to agree. Collective.

    `arrays` are this rank's fields, if they exist. `outer` is the setup of the plan to which these
    messages belong, if they are not all of it. A plan that `is_staged` sends messages of MPI out of
    host memory alone.
    """
    pairs, route = setup.context.report.pairs, setup.same["MPISHARE_ROUTE"]
    peers = [message.peer for message in (*sends, *recvs)]

    def choose() -> dict[str, Any]:
        found = routes.choose(setup.comm, pairs, peers, route, on_gpu=setup.on_gpu)
        return {
            "routes": [*found.items()],
            "sends": pack_messages(sends),
            "recvs": pack_messages(recvs),
            "locations": locations(setup.context, arrays, setup.mine),
            "gpu memory": (setup.on_gpu and not is_staged and why_no_gpu_messages()) or "",
            "nccl": nccl_choice.ask(setup),
            "is compiled": _are_compiled(setup, recvs),
        }

    replies = begin_plan(setup, engine_class, choose)
    chosen = _agreed_routes(setup, replies, is_staged=is_staged)
    packed = [[reply[kind] for reply in replies] for kind in ("sends", "recvs")]
    sends_by_rank, recvs_by_rank = ([*map(unpack_messages, each, chosen)] for each in packed)
    return RoutedSetup(
        **vars(setup),
        my_sends=sends,
        my_recvs=recvs,
        sends=sends_by_rank,
        recvs=recvs_by_rank,
        routes=chosen,
        locations=[[at and Location(*at) for at in reply["locations"]] for reply in replies],
        is_compiled=all(reply["is compiled"][0] for reply in replies),
        is_reverse_compiled=all(reply["is compiled"][1] for reply in replies),
        chain=outer.chain if outer else StreamChain(setup.context.backend, setup.name),
    )


def _are_compiled(setup: PlanSetup, recvs: Sequence[Message]) -> tuple[bool, bool]:
    """Whether C can move what this rank receives, and whether it can add what comes back."""
    module = setup.context.compiled
    if module is None:
        return False, False
    known = [added_in_c(module, each.dtype) is not None for each in setup.mine]
    parts = (part for message in recvs for part in message.parts)
    return all(part.factors is None or known[part.field] for part in parts), all(known)


def _agreed_routes(
    setup: PlanSetup, replies: Sequence[Any], *, is_staged: bool
) -> list[dict[int, Route]]:
    """Return the routes of each rank; raise on all ranks if one of them is not allowed."""
    chosen = [{peer: ROUTES[name] for peer, name in reply["routes"]} for reply in replies]
    has_messages = not is_staged and any(MESSAGES in each.values() for each in chosen)
    answers = [reply["gpu memory"] for reply in replies]
    between = MESSAGES
    if nccl_choice.settle(setup, [reply["nccl"] for reply in replies]):
        between = NCCL
    elif routes.settle_messages(setup, answers, has_messages=has_messages):
        between = GPU_MESSAGES
    chosen = [
        {peer: between if route is MESSAGES else route for peer, route in each.items()}
        for each in chosen
    ]
    routes.refuse(setup, chosen)
    return chosen

"""The node of a plan: that of the user, or one that is kept for the plan's ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from mpishare.coordination.abort import abort_when_left
from mpishare.coordination.mpi_agreement import (
    CommWatch,
    agree_keeping,
    duplicate,
    identify,
    known,
)
from mpishare.coordination.waits import of_this_thread
from mpishare.node import Node, require_node
from mpishare.plans.comm import PlanComm
from mpishare.runtime.context import NodeContext

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mpi4py import MPI

T = TypeVar("T")

_DEFAULT_TIMEOUT_S = 300.0


class NewRanks:
    """The ranks of a plan that have no node yet, until one is made for it."""

    context = None

    def __init__(self, given: MPI.Intracomm, call: str) -> None:
        self.comm = duplicate(given, CommWatch(call, _DEFAULT_TIMEOUT_S))
        self.rank = self.comm.rank

    def step_keeping(self, call: str, work: Callable[[], tuple[T, Any]]) -> tuple[T, list[Any]]:
        """Do a step as `Agreement.step_keeping`. Collective."""
        return agree_keeping(self.comm, work, CommWatch(call, _DEFAULT_TIMEOUT_S))

    def close(self) -> None:
        """Free the communicator. Collective."""
        self.comm.Free()


def kept_nodes(ranks: Mapping[int, int]) -> dict[str, Node]:
    """Return the whole nodes that are kept for plans of these ranks, by the backend of these."""
    kept = [
        each.kept
        for each in of_this_thread()
        if each.kept and each.life.failure is None and each.block.are_all_present()
    ]
    return {name: node for name, node in kept if known(node._context.comms[-1]) == ranks}


def find_comm(given: Any, comm: MPI.Intracomm, call: str) -> PlanComm | NewRanks:
    """Return the communicator of a plan on its node, if there is one, or on any. Collective."""
    if isinstance(given, NodeContext):
        return PlanComm.of(given, comm, call)
    kept = kept_nodes(identify(comm, CommWatch(call, _DEFAULT_TIMEOUT_S)))
    for node in kept.values():
        # Ranks of other nodes may not have one any more, and none would hear of that.
        if node._context.size == comm.size:
            return PlanComm.of(node._context, comm, call)
    return NewRanks(comm, call)


class NodeChoice(NamedTuple):
    is_given: bool
    # Whether this rank has a cached node that works.
    is_cached: bool
    # Plans of this kind that it has made there.
    number: int


def context_of(node: Any) -> Any:
    """Return the context of a ``node=``, which plans hold in its place, so that it can be dropped.

    `look_for_node` refuses what is none, on all ranks.
    """
    return node._context if isinstance(node, Node) else node


def look_for_node(own: PlanComm | NewRanks, call: str, given: Any, backend: str) -> NodeChoice:
    """Return this rank's choice; raise for a bad ``node=``."""
    if isinstance(given, NodeContext):
        given.agreement.check()
    elif given is not None:
        require_node(call, given)
    kept = kept_nodes(known(own.comm)).get(backend)
    found = context_of(kept) if given is None else given
    number = 0 if found is None else found.numbers[call]
    return NodeChoice(given is not None, kept is not None, number)


def comm_on_node(
    own: PlanComm | NewRanks,
    comm: MPI.Intracomm,
    call: str,
    given: NodeContext | None,
    backend: str,
    choices: Sequence[NodeChoice],
) -> PlanComm:
    """Return the communicator of a plan on its node. Collective, host-blocking.

    ``"cuda"`` fields need a node of that backend, ``"host"`` and ``"auto"`` fields take any.
    """
    if len({choice.is_given for choice in choices}) > 1:
        raise ValueError(f"{call} failed: node= must be given on all ranks or on none")
    if given is not None and isinstance(own, PlanComm):
        return own
    node = kept_nodes(known(comm)).get(backend)
    if node is None or not all(choice.is_cached for choice in choices):
        # NumPy fields need no GPU, and a node without one is made at once.
        node = Node(comm, backend="host" if backend == "host" else "auto")
        node._context.agreement.kept = backend, node
    found = PlanComm.of(node._context, comm, call)
    if isinstance(own, NewRanks):
        own.close()
    return found


def name_plan(call: str, context: NodeContext, choices: Sequence[NodeChoice]) -> str:
    """Return the name of a plan: the same on all of its ranks, and new on each."""
    # Some ranks may have made plans without the others.
    number = 1 + max(choice.number for choice in choices)
    context.numbers[call] = max(number, context.numbers[call])
    return f"{call} {number}"


def ranks_left_out(comm: PlanComm) -> list[int]:
    """Return the plan's ranks on this machine that are not in its node, which was given then.

    Ranks of the node's communicator that MPI finds on another machine do not count.
    """
    mine = comm.places[comm.rank]
    beside = [
        r for r, place in enumerate(comm.places) if place == mine and r not in comm.ranks_here
    ]
    if not beside:
        return []
    mine, there = [*known(comm.comm)], known(comm.context.comms[-1])
    return [rank for rank in beside if mine[rank] not in there]


def leave_node(given: Any, call: str, error: BaseException) -> None:
    """Leave the node of a plan by an error that the others do not know of.

    Without one that is given, the job is aborted when this process ends.
    """
    if isinstance(given, NodeContext):
        given.agreement.life.leave(call, error)
    else:
        abort_when_left(call, error)

"""The node of a plan: that of the user, or one that is kept for the plan's ranks."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from mpishare.coordination.abort import abort_when_left
from mpishare.coordination.mpi_agreement import CommWatch, identify, known, ranks_in, watching
from mpishare.node import Node, require_node
from mpishare.runtime.context import NodeContext

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mpi4py import MPI

    from mpishare.coordination.mpi_agreement import Watch
    from mpishare.coordination.rank_group import RankGroup
    from mpishare.plans.comm import PlanComm

_DEFAULT_TIMEOUT_S = 300.0


def kept_as(group: RankGroup, context: Any) -> Node | None:
    """Return the node of this context, if it is kept for these ranks."""
    return next((node for node in group.nodes.values() if node._context is context), None)


def release_node(group: RankGroup, context: Any) -> None:
    """Close a node that is kept for these ranks, once they have no plan on it. Collective then."""
    node = kept_as(group, context)
    if node is not None and ((ranks := context.plan_ranks.get(group)) is None or not ranks.plans):
        group.nodes = {name: each for name, each in group.nodes.items() if each is not node}
        node.close()


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


def look_for_node(group: RankGroup, call: str, given: Any, backend: str) -> NodeChoice:
    """Return this rank's choice; raise for a bad ``node=``."""
    if isinstance(given, NodeContext):
        given.agreement.check()
    elif given is not None:
        require_node(call, given)
    kept = group.nodes.get(backend)
    if kept is not None and kept._context.life.failure is not None:
        kept = None
    found = context_of(kept) if given is None else given
    number = 0 if found is None else found.numbers[call]
    return NodeChoice(given is not None, kept is not None, number)


def find_node(
    group: RankGroup,
    comm: MPI.Intracomm,
    call: str,
    given: NodeContext | None,
    backend: str,
    choices: Sequence[NodeChoice],
) -> NodeContext:
    """Return the node of a plan. Collective, host-blocking.

    ``"cuda"`` fields need a node of that backend, ``"host"`` and ``"auto"`` fields take any.
    """
    if len({choice.is_given for choice in choices}) > 1:
        raise ValueError(f"{call} failed: node= must be given on all ranks or on none")
    if given is not None:
        return given
    if not all(choice.is_cached for choice in choices):
        # NumPy fields need no GPU, and a node without one is made at once.
        group.nodes[backend] = Node(comm, backend="host" if backend == "host" else "auto")
    return group.nodes[backend]._context  # type: ignore[no-any-return]


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


@contextmanager
def watching_setup(given: Any, comm: MPI.Intracomm, call: str) -> Iterator[Watch]:
    """Yield the watch over a wait for a plan's ranks.

    That of a given node names its missing ranks in a `PeerTimeout`. It is collective on a
    communicator whose ranks are not known yet.
    """
    if not isinstance(given, NodeContext):
        yield CommWatch(call, _DEFAULT_TIMEOUT_S)
        return
    agreement = given.agreement
    agreement.check()
    if not known(comm):
        with watching(agreement, ranks_in(agreement, comm), call) as watch:
            identify(comm, watch)
    with watching(agreement, ranks_in(agreement, comm), call) as watch:
        yield watch


def own_communicator(given: Any, comm: MPI.Intracomm) -> MPI.Intracomm:
    """Return the communicator of a given node that has the ranks of `comm`; else `comm` itself.

    A collective that some ranks never call breaks its communicator, which should not be the user's.
    """
    comms = given.comms if isinstance(given, NodeContext) else ()
    return next((own for own in comms if known(own) == known(comm)), comm)


def meeting(given: Any, comm: MPI.Intracomm, call: str) -> Callable[[bool], bool]:
    """Return a function of this rank's flag to whether any rank of `comm` has it.

    Collective over a given node whose ranks those are; else it returns the rank's own.
    """
    if isinstance(given, NodeContext):
        agreement = given.agreement
        if known(comm).keys() == agreement.ranks.keys():
            return lambda mine: any(agreement.step(call, lambda: mine))
    return bool


def leave_node(given: Any, call: str, error: BaseException) -> None:
    """Leave the node of a plan by an error that the others do not know of.

    Without one that is given, the job is aborted when this process ends.
    """
    if isinstance(given, NodeContext):
        given.agreement.life.leave(call, error)
    else:
        abort_when_left(call, error)

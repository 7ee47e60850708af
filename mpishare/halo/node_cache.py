"""The node of a plan: the one that the user gives, or one that is kept for the plan's ranks."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from mpishare.coordination.missing_ranks import MissingRanks
from mpishare.errors import UnsupportedError
from mpishare.node import Node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mpi4py import MPI

    from mpishare.context import NodeContext
    from mpishare.coordination.rank_group import RankGroup
    from mpishare.halo.plan_comm import PlanComm

_DEFAULT_TIMEOUT_S = 300.0


class NodeCache:
    """The nodes that plans without ``node=`` keep for their ranks, by backend or ``"auto"``.

    A node stays while there are plans on it.
    """

    _of_group: ClassVar[dict[RankGroup, NodeCache]] = {}

    def __init__(self, group: RankGroup) -> None:
        self.nodes: dict[str, Node] = {}
        self._group = group
        self._plans: dict[Node, int] = {}

    @classmethod
    def of(cls, group: RankGroup) -> NodeCache:
        """Return the cache of a group of ranks."""
        return cls._of_group.setdefault(group, cls(group))

    @classmethod
    def kept(cls, group: RankGroup, backend: str) -> Node | None:
        """Return the node that is kept for a group of ranks."""
        cache = cls._of_group.get(group)
        return None if cache is None else cache.nodes.get(backend)

    def acquire(self, node: Node) -> None:
        """Count one more plan."""
        self._plans[node] = self._plans.get(node, 0) + 1

    def release(self, backend: str, node: Node) -> None:
        """Count one plan less, and close the node with the last one. Collective then."""
        self._plans[node] -= 1
        if not self._plans[node]:
            del self._plans[node]
            if self.nodes.get(backend) is node:
                del self.nodes[backend]
            if not self.nodes and not self._plans:
                self._of_group.pop(self._group, None)
            node.close()


class NodeChoice(NamedTuple):
    """What a rank says of the node of its plan."""

    is_given: bool
    is_cached: bool
    """Whether it has one cached that works."""
    number: int
    """How many plans of this kind it had there."""


def look_for_node(
    group: RankGroup, call: str, node: Any, backend: str
) -> tuple[NodeChoice, Node | None]:
    """Return what this rank says of the node, and the node if there is one already.

    Local. Raises if ``node=`` cannot be used.
    """
    if node is not None and not isinstance(node, Node):
        raise TypeError(f"{call} failed: node must be an mpishare.Node, not {node!r}")
    if node is not None:
        context_of(node).agreement.check()
    kept = NodeCache.kept(group, backend)
    is_cached = kept is not None and context_of(kept).agreement.failure is None
    found = node or (kept if is_cached else None)
    number = 0 if found is None else context_of(found).last_number(call)
    return NodeChoice(node is not None, is_cached, number), found


def find_node(
    group: RankGroup,
    given: MPI.Intracomm,
    call: str,
    node: Any,
    backend: str,
    choices: Sequence[NodeChoice],
) -> tuple[Node, NodeCache | None]:
    """Return the node of a plan, and the cache that counts it. Collective, host-blocking.

    Parameters
    ----------
    group : RankGroup
        The plan's ranks, for which a node is kept for the next plan.
    given : mpi4py.MPI.Intracomm
        The user's communicator of these ranks.
    node : Node or None
        As the user gave it.
    backend : str
        The backend of the fields: ``"cuda"`` fields need a node of that backend, ``"host"`` fields
        and ``"auto"`` take any.
    choices : sequence of NodeChoice
        What each rank says.
    """
    if len({choice.is_given for choice in choices}) > 1:
        raise ValueError(f"{call} failed: node= must be given on all ranks or on none")
    if node is not None:
        return node, None
    if all(choice.is_cached for choice in choices):
        cache = NodeCache.of(group)
        found = cache.nodes[backend]
    else:
        # NumPy fields need no GPU, and a node without one is made in no time.
        found = Node(given, backend="host" if backend == "host" else "auto")
        cache = NodeCache.of(group)
        cache.nodes[backend] = found
    cache.acquire(found)
    return found, cache


def name_plan(call: str, context: NodeContext, choices: Sequence[NodeChoice]) -> str:
    """Return the name of a plan, the same on all of its ranks, and new on each. Local."""
    # Some of them may have made plans without the others.
    number = 1 + max(choice.number for choice in choices)
    context.raise_number(call, number)
    return f"{call} {number}"


def require_backend(call: str, node: Node, backend: str) -> None:
    """Raise if a node is not for fields of a backend. Local, the same on all ranks."""
    if backend == "cuda" and node.backend != "cuda":
        raise UnsupportedError(
            f"{call} failed: the fields are in GPU memory, and the node is on the host backend"
        )


def ranks_left_out(comm: PlanComm, node: Node | None) -> list[int]:
    """Return the plan's ranks on this machine that a given node was made without. Local.

    Those that it was made with, and that MPI says are on another machine, are not meant.
    """
    mine = comm.places[comm.rank]
    beside = [
        r for r, place in enumerate(comm.places) if place == mine and r not in comm.ranks_here
    ]
    if node is None or not beside:
        return []
    plan, known = comm.comm.Get_group(), node._comms[-1].Get_group()
    found = plan.Translate_ranks(beside, known)
    plan.Free()
    known.Free()
    return [rank for rank, there in zip(beside, found, strict=True) if there < 0]


@contextmanager
def setup_deadline(
    node: Any, comm: MPI.Intracomm, call: str, look: Callable[[], object] = int
) -> Iterator[tuple[float, MissingRanks | None]]:
    """Yield the deadline of a wait for a plan's ranks, and its monitor where a node is given.

    Then a `PeerTimeout` names the ranks of the node that did not come. The monitor also calls
    `look`, which may raise.
    """
    if not isinstance(node, Node):
        yield _DEFAULT_TIMEOUT_S, None
        return
    agreement = context_of(node).agreement
    agreement.check()
    with MissingRanks(agreement, agreement.ranks_in(comm), call, look) as monitor:
        yield agreement.timeout_s, monitor


def context_of(node: Node) -> NodeContext:
    """Return what the objects of a node use."""
    return node._context


def leave_node(node: Any, call: str, error: BaseException) -> None:
    """Leave the node of a plan by an error that the others do not know of. Local.

    Without one that is given or kept, the others hear of it when this process ends.
    """
    if isinstance(node, Node):
        context_of(node).agreement.leave(call, error)

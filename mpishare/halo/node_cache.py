"""The node of a plan: the one that the user gives, or one that is kept on the communicator."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from mpishare.errors import UnsupportedError
from mpishare.halo.plan_comm import MissingRanks
from mpishare.node import Node

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mpi4py import MPI

    from mpishare.context import NodeContext
    from mpishare.halo.plan_comm import PlanComm

_DEFAULT_TIMEOUT_S = 300.0
_keyval: list[int] = []


class NodeCache:
    """The nodes that plans without ``node=`` keep on a communicator, by backend or ``"auto"``.

    A node stays while there are plans on it.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self._plans: dict[Node, int] = {}

    def acquire(self, backend: str) -> None:
        """Count one more plan."""
        node = self.nodes[backend]
        self._plans[node] = self._plans.get(node, 0) + 1

    def release(self, backend: str, node: Node) -> None:
        """Count one plan less, and close the node with the last one. Collective then."""
        self._plans[node] -= 1
        self.close_unused(backend, node)

    def close_unused(self, backend: str, node: Node) -> None:
        """Close a node that no plan uses. Collective then."""
        if not self._plans.get(node):
            self._plans.pop(node, None)
            if self.nodes.get(backend) is node:
                del self.nodes[backend]
            node.close()


class NodeChoice(NamedTuple):
    """Whether a rank was given a node for its plan, and whether it has one cached that works."""

    is_given: bool
    is_cached: bool


def look_for_node(given: MPI.Intracomm, call: str, node: Any, backend: str) -> NodeChoice:
    """Return what this rank says of the node; raises if ``node=`` cannot be used. Local."""
    if node is not None and not isinstance(node, Node):
        raise TypeError(f"{call} failed: node must be a mpishare.Node, not {node!r}")
    if node is not None:
        context_of(node).agreement.check()
    return NodeChoice(node is not None, _is_usable(_cache_of(given).nodes.get(backend)))


def find_node(
    given: MPI.Intracomm, call: str, node: Any, backend: str, choices: Sequence[NodeChoice]
) -> tuple[Node, NodeCache | None]:
    """Return the node of a plan, and the cache that keeps it. Collective, host-blocking.

    Parameters
    ----------
    given : mpi4py.MPI.Intracomm
        The user's, on which a node is kept for the next plan.
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
    used_cache = None
    if node is None:
        used_cache = _cache_of(given)
        if not all(choice.is_cached for choice in choices):
            # NumPy fields need no GPU, and a node without one is made in no time.
            backend_asked = "host" if backend == "host" else "auto"
            used_cache.nodes[backend] = Node(given, backend=backend_asked)
        node = used_cache.nodes[backend]
    if backend == "cuda" and node.backend != "cuda":
        raise UnsupportedError(
            f"{call} failed: the fields are in GPU memory, and the node is on the host backend"
        )
    return node, used_cache


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
    node: Any, comm: MPI.Intracomm, call: str
) -> Iterator[tuple[float, MissingRanks | None]]:
    """Yield the deadline of a wait for a plan's ranks, and its monitor where a node is given.

    Then a `PeerTimeout` names the ranks of the node that did not come.
    """
    if not isinstance(node, Node):
        yield _DEFAULT_TIMEOUT_S, None
        return
    agreement = context_of(node).agreement
    agreement.check()
    mine, theirs = node.comm.Get_group(), comm.Get_group()
    found = mine.Translate_ranks(list(range(node.size)), theirs)
    ranks = [rank for rank, there in enumerate(found) if there >= 0]
    mine.Free()
    theirs.Free()
    with MissingRanks(agreement, ranks, call) as monitor:
        yield agreement.timeout_s, monitor


def context_of(node: Node) -> NodeContext:
    """Return what the objects of a node use."""
    return node._context


def _is_usable(node: Node | None) -> bool:
    return node is not None and context_of(node).agreement.failure is None


def _cache_of(comm: MPI.Intracomm) -> NodeCache:
    from mpi4py import MPI

    if not _keyval:
        _keyval.append(MPI.Comm.Create_keyval())
    cache: Any = comm.Get_attr(_keyval[0])
    if cache is None:
        cache = NodeCache()
        comm.Set_attr(_keyval[0], cache)
    return cache  # type: ignore[no-any-return]

"""The node that a plan stands on: the one it is given, or one kept on its communicator."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mpishare.coordination.mpi_agreement import agree
from mpishare.errors import PeerTimeout, UnsupportedError
from mpishare.halo.plan_comm import MissingRanks
from mpishare.node import Node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mpi4py import MPI

    from mpishare.context import NodeContext

_keyval: list[int] = []


class NodeCache:
    """Nodes that plans without node= keep on a communicator, by backend, while there are plans."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self._plans: dict[Node, int] = {}

    def take(self, backend: str) -> None:
        """Count one more plan."""
        node = self.nodes[backend]
        self._plans[node] = self._plans.get(node, 0) + 1

    def give(self, backend: str, node: Node) -> None:
        """Count one less, and close the node with the last. Collective then."""
        self._plans[node] -= 1
        self.drop(backend, node)

    def drop(self, backend: str, node: Node) -> None:
        """Close a node that no plan stands on. Collective then."""
        if not self._plans.get(node):
            self._plans.pop(node, None)
            if self.nodes.get(backend) is node:
                del self.nodes[backend]
            node.close()


def node_of(
    comm: MPI.Intracomm, whole: MPI.Intracomm, call: str, node: Any, backend: str
) -> tuple[Node, NodeCache | None]:
    """Return the node of a plan, and who keeps it. Collective over `comm`, host-blocking.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The user's, on which a node is kept for the next plan.
    whole : mpi4py.MPI.Intracomm
        The plan's own.
    node : Node or None
        Given, or not, on all ranks alike.
    backend : str
        Of the fields: ``"cuda"`` fields need a node of that backend, ``"host"`` fields take any.
    """
    kept = _kept(comm)

    def look() -> list[bool]:
        if node is not None and not isinstance(node, Node):
            raise TypeError(f"{call} failed: node must be a mpishare.Node, not {node!r}")
        if node is not None:
            context_of(node).agreement.check()
        return [node is not None, _is_whole(kept.nodes.get(backend))]

    with patience(node, comm, call) as (timeout_s, check):
        told = agree(whole, call, look, timeout_s, check)
    if len({given for given, _ in told}) > 1:
        raise ValueError(f"{call} failed: node= must be given on all ranks or on none")
    if node is None:
        if not all(is_kept for _, is_kept in told):
            # NumPy fields need no GPU, and a node without one is made in no time.
            kept.nodes[backend] = Node(comm, backend="host" if backend == "host" else "auto")
        node, cache = kept.nodes[backend], kept
    else:
        cache = None
    if backend == "cuda" and node.backend != "cuda":
        raise UnsupportedError(
            f"{call} failed: the fields are in GPU memory, and the node is on the host backend"
        )
    return node, cache


@contextmanager
def patience(
    node: Any, comm: MPI.Intracomm, call: str
) -> Iterator[tuple[float, Callable[[], None] | None]]:
    """Give how long to wait for ranks, and what to call meanwhile: the node's, if there is one.

    Local. A rank that does not come is named in a `PeerTimeout`, where it is on this node.
    """
    if not isinstance(node, Node):
        yield 300.0, None
        return
    agreement = node._context.agreement
    agreement.check()
    mine, theirs = node.comm.Get_group(), comm.Get_group()
    found = mine.Translate_ranks(list(range(node.size)), theirs)
    mates = [rank for rank, there in enumerate(found) if there >= 0]
    mine.Free()
    theirs.Free()
    with MissingRanks(agreement, mates, call) as absent:
        try:
            yield agreement.timeout_s, absent.look
        except PeerTimeout:
            missing = absent.missing()
            if agreement.failure is not None or not missing:
                raise
            raise agreement.timed_out(call, missing, agreement.timeout_s) from None


def context_of(node: Node) -> NodeContext:
    """Return what the objects of a node stand on. Local."""
    return node._context


def _is_whole(node: Node | None) -> bool:
    return node is not None and context_of(node).agreement.failure is None


def _kept(comm: MPI.Intracomm) -> NodeCache:
    from mpi4py import MPI

    if not _keyval:
        _keyval.append(MPI.Comm.Create_keyval())
    kept: Any = comm.Get_attr(_keyval[0])
    if kept is None:
        kept = NodeCache()
        comm.Set_attr(_keyval[0], kept)
    return kept  # type: ignore[no-any-return]

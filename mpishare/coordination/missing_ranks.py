"""Waits for MPI messages: the nodes know which ranks are missing, and where these wait."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from mpishare.coordination.poll import poll
from mpishare.coordination.waits import PUBLISH_S, WaitMonitor, of_this_thread
from mpishare.errors import PeerTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from mpi4py import MPI

    from mpishare.coordination.waits import Waits

# By then a waiting rank has published its wait.
_STATUS_S = 4 * PUBLISH_S


@contextmanager
def naming_missing(
    agreement: Waits, ranks: Collection[int], call: str, look: Callable[[], object] = int
) -> Iterator[WaitMonitor]:
    """Watch a wait for MPI messages, and name the ranks of this node that have not come.

    `ranks` of the node must make the call. `look` is called at each check; its exception ends the
    wait. After a `PeerTimeout` the node is broken: a collective that is late cannot be cancelled.
    """
    absent = partial(_absent, agreement, ranks, call)

    def check() -> None:
        agreement.check()
        look()

    # Both end last: this rank must not seem missing before it has left.
    with agreement.waiting_in(call), WaitMonitor(agreement, call, absent, check) as monitor:
        try:
            yield monitor
        except PeerTimeout as error:
            if agreement.failure is not None:
                raise
            # Those that have just come get the time to publish it.
            poll(lambda: not absent(), _STATUS_S)
            if missing := absent():
                raise agreement.timed_out(call, missing) from None
            raise agreement.fail_and_tell(error, fatal=True) from None


def _absent(node: Waits, ranks: Collection[int], call: str) -> list[int]:
    """Return the ranks that do not wait in this call now."""
    found = {rank: node.block.status(rank) for rank in ranks if rank != node.rank}
    return [rank for rank, each in found.items() if each is None or each.call != call]


@contextmanager
def bystanding(comm: MPI.Comm, call: str) -> Iterator[Callable[[], None]]:
    """Watch a wait across nodes by a function, for all nodes of this process that share its ranks.

    A rank of these nodes that waits for this rank sees its wait, and a cycle of such waits is an
    error on both. Of a node that was broken before, or is about to be since this rank has left a
    block, only the ranks whose processes end are missed: the others may have caught the error, and
    come.
    """
    nodes = [(node, ranks) for node in of_this_thread() if (ranks := node.ranks_in(comm))]
    were_broken = {node for node, _ in nodes if _is_breaking(node)}
    with ExitStack() as watched:
        monitors = [
            watched.enter_context(WaitMonitor(node, call, partial(_absent, node, ranks, call)))
            for node, ranks in nodes
        ]

        def look() -> None:
            for (node, ranks), monitor in zip(nodes, monitors, strict=True):
                if node.failure is None:
                    monitor.look()
                elif _is_missed(node, ranks, was_broken=node in were_broken):
                    node.check()

        yield look


def _is_breaking(node: Waits) -> bool:
    return node.failure is not None or (node.block.is_open and node.block.is_ahead)


def _is_missed(node: Waits, ranks: Collection[int], *, was_broken: bool) -> bool:
    """Whether one of the ranks will not come, since its node is broken."""
    if was_broken or node.failure is None:
        return any(map(node.block.is_ending, ranks))
    return not {*ranks}.isdisjoint(getattr(node.failure, "ranks", ()))

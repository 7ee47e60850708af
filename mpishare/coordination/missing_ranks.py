"""Waits for MPI messages: the nodes know which ranks are missing, and where these wait."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Self

from mpishare.coordination.poll import poll
from mpishare.coordination.waits import PUBLISH_S, WaitMonitor, of_this_thread
from mpishare.errors import PeerTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from mpi4py import MPI

    from mpishare.coordination.waits import Waits

# By then a waiting rank has published its wait.
_STATUS_S = 4 * PUBLISH_S


class MissingRanks:
    """Watches a wait for MPI messages, and names the ranks of this node that have not come.

    `ranks` of the node must make the call. `look` is called at each check; its exception ends the
    wait.
    """

    def __init__(
        self,
        agreement: Waits,
        ranks: Collection[int],
        call: str,
        look: Callable[[], object] = int,
    ) -> None:
        self._agreement = agreement
        self._awaited = [rank for rank in ranks if rank != agreement.rank]
        self._call = call
        self._look = look
        self._naming = agreement.waiting_in(call)
        self._monitor = WaitMonitor(agreement, call, self.absent)
        self.warn = self._monitor.warn  # for `poll`

    def look(self) -> None:
        """Raise if the node is broken, or if ranks wait for each other."""
        self._agreement.check()
        self._look()
        self._monitor.look()

    def absent(self) -> list[int]:
        """Return the ranks that do not wait in this call now."""
        found = {rank: self._agreement.block.status(rank) for rank in self._awaited}
        return [rank for rank, each in found.items() if each is None or each.call != self._call]

    def __enter__(self) -> Self:
        self._naming.__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Publish that this rank no longer waits; add the node's missing ranks to a `PeerTimeout`.

        The node is broken then: a collective that is late cannot be cancelled.
        """
        # Only at the end: this rank must not seem missing before it has left.
        try:
            agreement = self._agreement
            if isinstance(error, PeerTimeout) and agreement.failure is None:
                # Those that have just come get the time to publish it.
                poll(lambda: not self.absent(), _STATUS_S)
                missing = self.absent()
                if not missing:
                    raise agreement.fail_and_tell(lambda: error, fatal=True) from None
                raise agreement.timed_out(self._call, missing) from None
        finally:
            self._naming.__exit__(None, None, None)
            self._monitor.end()


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
            watched.enter_context(WaitMonitor(node, call, MissingRanks(node, ranks, call).absent))
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
    return not {*ranks}.isdisjoint(getattr(node.failure(), "ranks", ()))

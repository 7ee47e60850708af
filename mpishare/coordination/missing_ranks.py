"""Waits for MPI messages: the nodes know which ranks are missing, and where these wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from mpishare.coordination.poll import poll
from mpishare.coordination.waits import PUBLISH_S, WaitMonitor, of_this_thread
from mpishare.errors import PeerTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

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
        self._monitor: WaitMonitor | None = None  # made at the first check, often never

    def look(self) -> None:
        """Raise if the node is broken, or if ranks wait for each other."""
        self._agreement.check()
        self._look()
        self._watch().look()

    def warn(self, waited_s: float) -> None:
        """Name the stragglers in a warning; for `poll`."""
        self._watch().warn(waited_s)

    def absent(self) -> list[int]:
        """Return the ranks that do not wait in this call now."""
        found = {rank: self._agreement.block.status(rank) for rank in self._awaited}
        return [rank for rank, each in found.items() if each is None or each.call != self._call]

    def missing(self) -> list[int]:
        """Return the absent ranks, once those that have just come had time to publish it."""
        poll(lambda: not self.absent(), _STATUS_S)
        return self.absent()

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
                missing = self.missing()
                if not missing:
                    raise agreement.fail_and_tell(lambda: error, fatal=True) from None
                raise agreement.timed_out(self._call, missing, agreement.timeout_s) from None
        finally:
            self._naming.__exit__(None, None, None)
            if self._monitor is not None:
                self._monitor.end()

    def _watch(self) -> WaitMonitor:
        if self._monitor is None:
            self._monitor = WaitMonitor(self._agreement, self._call, self.absent)
        return self._monitor


class Bystanders:
    """Watches a wait across nodes, for all nodes of this process that share ranks with `comm`.

    A rank of these nodes that waits for this rank sees its wait, and a cycle of such waits is an
    error on both. Of a node that was broken before, or is about to be since this rank has left a
    block, only the ranks whose processes end are missed: the others may have caught the error, and
    come.
    """

    def __init__(self, comm: MPI.Comm, call: str) -> None:
        self._monitors = [
            (node, {*ranks}, WaitMonitor(node, call, MissingRanks(node, ranks, call).absent))
            for node in of_this_thread()
            if (ranks := node.ranks_in(comm))
        ]
        self._were_broken = {
            node
            for node, *_ in self._monitors
            if node.failure is not None or (node.block.is_open and node.block.is_ahead)
        }

    def look(self) -> None:
        """Raise if ranks wait for each other, or if one that must call has left such a node."""
        for node, ranks, monitor in self._monitors:
            if node.failure is None:
                monitor.look()
            elif node in self._were_broken:
                if any(map(node.block.is_ending, ranks)):
                    node.check()
            elif ranks.intersection(getattr(node.failure(), "ranks", ())):
                node.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        for _, _, monitor in self._monitors:
            monitor.end()

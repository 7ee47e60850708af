"""The communicator of a plan: agreement across nodes, and the ranks that share this node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np

from mpishare.coordination.poll import poll
from mpishare.coordination.waits import PUBLISH_S, WaitMonitor
from mpishare.errors import PeerTimeout
from mpishare.halo.plan_ranks import PlanRanks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from mpi4py import MPI

    from mpishare.context import NodeContext, NodeObject
    from mpishare.coordination.agreement import Agreement
    from mpishare.coordination.rank_group import RankGroup
    from mpishare.halo.plan_ranks import PlanMemory

    Array = np.ndarray[Any, Any]

TAGS = 128
"""Tags of one plan: more than there are directions in a grid of four axes."""

_STATUS_S = 4 * PUBLISH_S
"""Within this time a waiting rank has published its status."""


class MissingRanks:
    """Watches a wait by MPI messages, and names missing ranks of the node; `look` may raise."""

    def __init__(
        self,
        agreement: Agreement,
        ranks: Collection[int],
        call: str,
        look: Callable[[], object] = int,
    ) -> None:
        self._agreement = agreement
        self._awaited = [rank for rank in ranks if rank != agreement.rank]
        self._call = call
        self._look = look
        self._monitor: WaitMonitor | None = None  # made late: most messages arrive earlier

    def look(self) -> None:
        """Raise if the node is broken, or if ranks wait for each other."""
        self._agreement.check()
        self._look()
        self._watch().look()

    def warn(self, waited_s: float) -> None:
        """Name the stragglers in a warning; for `poll`."""
        self._watch().warn(waited_s)

    def absent(self) -> list[int]:
        """Return the ranks that are not waiting in this call now."""
        found = {rank: self._agreement.status(rank) for rank in self._awaited}
        return [rank for rank, each in found.items() if each is None or each.call != self._call]

    def missing(self) -> list[int]:
        """Return the ranks that stay absent for longer than publishing a wait takes."""
        poll(lambda: not self.absent(), _STATUS_S)
        return self.absent()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Publish the end of the wait; add the missing ranks of the node to a `PeerTimeout`.

        The node is broken then: a collective that is late cannot be cancelled.
        """
        # Only at the end: until then the others must see this rank wait.
        try:
            agreement = self._agreement
            if isinstance(error, PeerTimeout) and agreement.failure is None:
                missing = self.missing()
                if not missing:
                    raise agreement.fail_and_tell(lambda: error, fatal=True) from None
                raise agreement.timed_out(self._call, missing, agreement.timeout_s) from None
        finally:
            if self._monitor is not None:
                self._monitor.end()

    def _watch(self) -> WaitMonitor:
        if self._monitor is None:
            self._monitor = WaitMonitor(self._agreement, self._call, self.absent)
        return self._monitor


class PlanComm:
    """The communicator of one plan, shared with the other plans of its ranks.

    Collective to make, host-blocking. Messages of this plan have `TAGS` tags from `first_tag` on.
    """

    def __init__(
        self, group: RankGroup, context: NodeContext, call: str, here: Sequence[Any]
    ) -> None:
        def monitored() -> MissingRanks:
            return MissingRanks(context.agreement, (), call)

        self._ranks = PlanRanks.of(group, context, call, here, monitored)
        self.context = context
        self.comm = group.comm
        self.rank, self.size = group.comm.rank, group.comm.size
        self.nodes, self.places = self._ranks.nodes, self._ranks.places
        self.ranks_here = self._ranks.here  # their ranks in the node, by those in the plan
        self._node_ranks = frozenset(self.ranks_here.values())
        self._ranks.begin_plan()
        self._place = group.take_place()
        self.first_tag = TAGS * self._place

    @property
    def is_of_one_node(self) -> bool:
        return len(self.ranks_here) == self.size

    @property
    def regions(self) -> Any:
        """Regions for staging buffers on the GPUs of these ranks, or None."""
        return self._ranks.regions

    @regions.setter
    def regions(self, regions: Any) -> None:
        self._ranks.regions = regions

    def close(self) -> None:
        """End the plan. Collective, once all have agreed that it is closed."""
        self._ranks.group.give_place(self._place)
        self._ranks.end_plan()

    def register(self, plan: NodeObject) -> None:
        """Register a complete plan with the node."""
        self.context.register(plan, self._ranks.dropped)

    def step(self, call: str, work: Callable[[], Any]) -> list[Any]:
        """Do `work`; return the results of all ranks, or raise on all. Collective."""
        agreement = self.context.agreement
        if self._ranks.is_node:
            return agreement.step(call, work)
        with MissingRanks(agreement, self._node_ranks, call) as monitor:
            return self._ranks.group.agree(call, work, agreement.timeout_s, monitor)

    def begin(self, call: str, work: Callable[[], Any]) -> list[Any]:
        """Do a step, then close the plans that all ranks have dropped. Collective."""
        dropped = self.context.news(self._ranks.dropped)
        replies = self.step(call, lambda: [dropped, work()])
        self.close_dropped([each[0] for each in replies])
        return [each[1] for each in replies]

    def close_dropped(self, dropped: Sequence[Sequence[int]]) -> None:
        """Close the plans that all ranks have dropped, given the list of each rank. Collective."""
        self._ranks.dropped.close(dropped, self.rank)

    def alltoallv(self, call: str, work: Callable[[], tuple[Array, Array]]) -> tuple[Array, Array]:
        """Send int64 numbers to every rank, and return theirs. Collective, host-blocking.

        `work` may raise; it returns the numbers, those for rank 0 first, and their count for each
        rank. The result has the same form.
        """
        given: list[Array] = []
        self.step(call, lambda: given.extend(np.ascontiguousarray(e, np.int64) for e in work()))
        numbers, counts = given
        their_counts = np.empty_like(counts)
        request = self.comm.Ialltoall(counts, their_counts)
        self._wait_request(call, request, counts, their_counts)
        self.step(call, lambda: given.append(np.empty(their_counts.sum(), np.int64)))
        theirs = given[-1]
        request = self.comm.Ialltoallv(
            [numbers, (counts, _begins(counts))], [theirs, (their_counts, _begins(their_counts))]
        )
        self._wait_request(call, request, numbers, theirs, counts, their_counts)
        return theirs, their_counts

    def _wait_request(self, call: str, request: MPI.Request, *memory: Array) -> None:
        agreement = self.context.agreement
        with MissingRanks(agreement, self._node_ranks, call) as monitor:
            self._ranks.group.wait(request, call, agreement.timeout_s, *memory, monitor=monitor)

    def take_memory(self, call: str, nbytes: int) -> PlanMemory:
        """Return host memory that the plan's ranks on this node share. Collective over all."""

        def step(work: Callable[[], Any]) -> list[Any]:
            replies = self.step(call, work)
            return [replies[rank] for rank in self.ranks_here]

        return self._ranks.take_memory(step, nbytes)

    def wait(self, call: str, pending: Callable[[], Sequence[int]]) -> None:
        """Wait on the host until no rank of this node is pending; see `Waits.wait`."""
        ranks_here = self.ranks_here
        self.context.agreement.wait(call, lambda: [ranks_here[rank] for rank in pending()])


def _begins(counts: Array) -> Array:
    return np.cumsum(counts) - counts

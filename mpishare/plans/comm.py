"""The communicator of a plan: agreement across nodes, and the ranks that share this node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mpishare.coordination.missing_ranks import MissingRanks
from mpishare.plans.ranks import PlanRanks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi4py import MPI

    from mpishare.coordination.rank_group import RankGroup
    from mpishare.plans.ranks import PlanMemory
    from mpishare.runtime.context import NodeContext, NodeObject

    Array = np.ndarray[Any, Any]

T = TypeVar("T")

TAGS = 128
"""Tags of one plan: more than there are directions in a grid of four axes."""


class PlanComm:
    """The communicator of one plan, shared with the other plans of its ranks.

    Collective to make, host-blocking. Messages of this plan have `TAGS` tags from `first_tag` on.
    """

    def __init__(
        self, group: RankGroup, context: NodeContext, call: str, here: Sequence[Any]
    ) -> None:
        self._ranks = PlanRanks.of(group, context, call, here)
        self.context = context
        self.comm = group.comm
        self.rank, self.size = group.comm.rank, group.comm.size
        self.nodes, self.places = self._ranks.nodes, self._ranks.places
        self.ranks_here = self._ranks.here  # their ranks in the node, by those in the plan
        self._node_ranks = frozenset(self.ranks_here.values())
        self._ranks.plans += 1
        self._place = group.take_place()
        self.first_tag = TAGS * self._place

    @property
    def is_of_one_node(self) -> bool:
        return len(self.ranks_here) == self.size

    def close(self) -> None:
        """End the plan. Collective, once all have agreed that it is closed."""
        self._ranks.group.give_place(self._place)
        self._ranks.end_plan()

    def register(self, plan: NodeObject) -> None:
        """Register a complete plan with the node."""
        self.context.register(plan, self._ranks.dropped)

    def step(self, call: str, work: Callable[[], Any]) -> list[Any]:
        """Do `work`; return the results of all ranks, or raise on all. Collective."""
        return self.step_keeping(call, lambda: (None, work()))[1]

    def step_keeping(self, call: str, work: Callable[[], tuple[T, Any]]) -> tuple[T, list[Any]]:
        """Do a step as `Agreement.step_keeping`. Collective."""
        agreement = self.context.agreement
        if self._ranks.is_node:
            return agreement.step_keeping(call, work)
        self.context.memory_barrier()
        with MissingRanks(agreement, self._node_ranks, call) as monitor:
            made = self._ranks.group.step_keeping(call, work, agreement.timeout_s, monitor)
        self.context.memory_barrier()  # messages of MPI order no shared memory by themselves
        return made

    def begin(self, call: str, work: Callable[[], Any]) -> list[Any]:
        """Do a step, then close the plans that all ranks have dropped. Collective."""
        dropped = self._ranks.dropped
        news = self.context.news(dropped)
        replies = self.step(call, lambda: [news, work()])
        dropped.close([each[0] for each in replies], self.rank)
        return [each[1] for each in replies]

    def alltoallv(self, call: str, work: Callable[[], tuple[Array, Array]]) -> tuple[Array, Array]:
        """Send int64 numbers to every rank, and return theirs. Collective, host-blocking.

        `work` may raise; it returns the numbers, those for rank 0 first, and their count for each
        rank. The result has the same form.
        """

        def give() -> tuple[list[Array], None]:
            return [np.ascontiguousarray(each, np.int64) for each in work()], None

        (numbers, counts), _ = self.step_keeping(call, give)
        their_counts = np.empty_like(counts)
        request = self.comm.Ialltoall(counts, their_counts)
        self._wait_request(call, request, counts, their_counts)
        theirs, _ = self.step_keeping(call, lambda: (np.empty(their_counts.sum(), np.int64), None))
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

        def step(work: Callable[[], tuple[Any, Any]]) -> tuple[Any, list[Any]]:
            kept, replies = self.step_keeping(call, work)
            return kept, [replies[rank] for rank in self.ranks_here]

        return self._ranks.take_memory(step, nbytes)

    def wait(self, call: str, pending: Callable[[], Sequence[int]]) -> None:
        """Wait on the host until no rank of this node is pending; see `Waits.wait`."""
        ranks_here = self.ranks_here
        self.context.agreement.wait(call, lambda: [ranks_here[rank] for rank in pending()])


def _begins(counts: Array) -> Array:
    return np.cumsum(counts) - counts

"""The communicator of a plan, and the ranks and the memory that all plans of a group share."""

from __future__ import annotations

from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from mpishare.coordination.counters import SLOT_WORDS, CounterPool
from mpishare.coordination.life import Event
from mpishare.coordination.mpi_agreement import watching
from mpishare.coordination.objects import Dropped
from mpishare.coordination.waits import WaitMonitor
from mpishare.errors import late_elsewhere
from mpishare.memory.shared import place

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mpi4py import MPI

    from mpishare.coordination.rank_group import RankGroup
    from mpishare.errors import MpiShareError, PeerTimeout
    from mpishare.memory.shared import Steps
    from mpishare.runtime.context import NodeContext

    Array = np.ndarray[Any, Any]

T = TypeVar("T")

TAGS = 256
"""Tags of one plan: more than there are directions in a grid of four axes."""


class PlanComm:
    """The communicator of one plan, shared with the other plans of its ranks.

    Collective to make, host-blocking. Messages of this plan have `TAGS` tags from `first_tag` on.
    """

    def __init__(self, group: RankGroup, context: NodeContext, call: str) -> None:
        self._ranks = PlanRanks.of(group, context, call)
        self.context = context
        self.comm = group.comm
        self.rank, self.size = group.comm.rank, group.comm.size
        self.nodes, self.places = self._ranks.nodes, self._ranks.places
        self.is_of_one_node = self._ranks.is_of_one_node
        self.ranks_here = self._ranks.here  # their ranks in the node, by those in the plan
        self.dropped = self._ranks.dropped
        self.ranks = frozenset(group.ranks.items())  # the same for the same ranks in their order
        self._node_ranks = frozenset(self.ranks_here.values())
        self._ranks.plans += 1
        self._place = group.take_place()
        self.first_tag: int = TAGS * self._place

    def close(self) -> None:
        """End the plan. Collective, once all have agreed that it is closed."""
        ranks = self._ranks
        ranks.group.give_place(self._place)
        ranks.plans -= 1
        # Ranks of one node keep memory for their next plan until the node closes; ranks of several
        # nodes close theirs at different times.
        if not ranks.plans and not ranks.is_of_one_node:
            ranks.close()

    def step(self, call: str, work: Callable[[], Any]) -> list[Any]:
        """Do `work`; return the results of all ranks, or raise on all. Collective."""
        return self.step_keeping(call, lambda: (None, work()))[1]

    def step_keeping(self, call: str, work: Callable[[], tuple[T, Any]]) -> tuple[T, list[Any]]:
        """Do a step as `Agreement.step_keeping`. Collective."""
        agreement = self.context.agreement
        if self._ranks.is_node:
            return agreement.step_keeping(call, work)
        agreement.begin_step(call)
        self.context.memory_barrier()
        with watching(agreement, self._node_ranks, call) as watch:
            made = self._ranks.group.step_keeping(work, watch)
        self.context.memory_barrier()  # messages of MPI order no shared memory by themselves
        return made

    def begin(self, call: str, work: Callable[[], Any]) -> list[Any]:
        """Do a step, then close the plans that all ranks have dropped. Collective."""
        ids = self.context.dropped_ids(self.dropped)
        replies = self.step(call, lambda: [ids, work()])
        self.dropped.close([each[0] for each in replies], self.rank)
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
        request = self.comm.Ialltoallv([numbers, counts], [theirs, their_counts])
        self._wait_request(call, request, numbers, theirs, counts, their_counts)
        return theirs, their_counts

    def _wait_request(self, call: str, request: MPI.Request, *memory: Array) -> None:
        with watching(self.context.agreement, self._node_ranks, call) as watch:
            self._ranks.group.wait(request, watch, *memory)

    def take_memory(self, call: str, nbytes: int) -> PlanMemory:
        """Return host memory that the plan's ranks on this node share. Collective over all."""

        def step(work: Callable[[], tuple[Any, Any]]) -> tuple[Any, list[Any]]:
            kept, replies = self.step_keeping(call, work)
            return kept, [replies[rank] for rank in self.ranks_here]

        return self._ranks.take_memory(step, nbytes)

    def timed_out(self, call: str, pending: Sequence[int]) -> MpiShareError:
        """End the node since ranks of the plan are missing, publish it, and return the error."""
        agreement = self.context.agreement
        here = [self.ranks_here[rank] for rank in pending if rank in self.ranks_here]
        if len(here) == len(pending):
            return agreement.timed_out(call, here)
        return agreement.life.end_by(
            Event.DEADLINE, self.late(call, pending, agreement.where(here))
        )

    def late(
        self, call: str, pending: Sequence[int], where: Mapping[int, str] = MappingProxyType({})
    ) -> PeerTimeout:
        """Return the error of missing ranks, which are not all of this node."""
        here = [self.ranks_here[rank] for rank in pending if rank in self.ranks_here]
        me, timeout_s = f"rank {self.rank} of {self.size}", self.context.agreement.timeout_s
        return late_elsewhere(call, pending, here, timeout_s, me, where)

    def wait(self, call: str, pending: Callable[[], Sequence[int]]) -> None:
        """Wait on the host until no rank of this node is pending; see `Waits.wait`."""
        ranks_here = self.ranks_here
        self.context.agreement.wait(call, lambda: [ranks_here[rank] for rank in pending()])

    def wait_anywhere(
        self,
        call: str,
        pending: Callable[[], Sequence[int]],
        is_over: Callable[[], object] | None = None,
        *,
        moves: bool = True,
    ) -> None:
        """Wait on the host until no rank of the plan is pending, with the node's deadline.

        For what messages bring: `is_over` tells it sooner than `pending`, and these tests move them
        on, if they are of MPI.
        """
        agreement, here = self.context.agreement, self.ranks_here

        def pending_here() -> list[int]:
            return [here[rank] for rank in pending() if rank in here]

        check = agreement.check_whole
        with WaitMonitor(agreement, call, pending_here, check, moves=moves) as monitor:
            if not monitor.poll(is_over or (lambda: not pending())):
                raise self.timed_out(call, pending())


_MAX_POOLED_NBYTES = 1 << 17
_CHUNK_NBYTES = 1 << 18


class PlanMemory(NamedTuple):
    """Host memory of one plan, zeroed; `address` is that on this rank's GPU, 0 on the host backend.

    `close` is local, called once, when no rank uses the memory, and on all ranks of the node before
    any of them takes memory.
    """

    buffer: memoryview[int]
    address: int
    nbytes: int
    close: Callable[[], None]


class PlanRanks:
    """The ranks of a group, and its part on this node, found once for all plans."""

    def __init__(self, group: RankGroup, context: NodeContext, replies: Sequence[Any]) -> None:
        self.group = group
        self.context = context
        self.nodes: list[str] = [node for node, _, _ in replies]  # unique names, by rank
        self.places: list[Any] = [where for _, _, where in replies]
        mine = self.nodes[group.comm.rank]
        # Ranks in the node by ranks in the group, for those on this node.
        self.here: dict[int, int] = {
            rank: rank_there for rank, (node, rank_there, _) in enumerate(replies) if node == mine
        }
        self.is_of_one_node = len(self.here) == len(replies)
        # Whether these are all ranks of the node, in its order.
        self.is_node = self.is_of_one_node and (
            [*self.here.items()] == [(r, r) for r in range(context.size)]
        )
        self.dropped = context.dropped if self.is_node else Dropped()
        self.plans = 0
        block = context.agreement.block
        self._memory_pool = block.plan_memory if self.is_node else CounterPool()

    @classmethod
    def of(cls, group: RankGroup, context: NodeContext, call: str) -> PlanRanks:
        """Return the ranks of a group on a node. Collective the first time, host-blocking."""
        found: PlanRanks | None = context.plan_ranks.get(group)
        if found is None:
            here = [context.nonces[0], context.rank, place()]
            with watching(context.agreement, (), call) as watch:
                _, replies = group.step_keeping(lambda: (None, here), watch)
            found = context.plan_ranks[group] = cls(group, context, replies)
            if found.is_of_one_node:
                group.blocks.append(context.agreement.block)
        return found

    def take_memory(self, step: Steps, nbytes: int) -> PlanMemory:
        """Return zeroed host memory for these ranks on their node, and for their GPUs.

        Small pieces come from memory that is mapped already; else collective over the group,
        host-blocking. `step` agrees with the ranks of the group on this node.
        """
        context, is_maker = self.context, next(iter(self.here)) == self.group.comm.rank
        nwords = max(SLOT_WORDS, 1 << (-(-nbytes // 8) - 1).bit_length())
        # Nodes may need different sizes, and could not agree whether to map more.
        if 8 * nwords > _MAX_POOLED_NBYTES or not self.is_of_one_node:
            memory, address = context.map_registered(step, nbytes, is_maker=is_maker)
            unmap = partial(context.unmap_registered, memory)
            return PlanMemory(memory.buffer, address, memory.nbytes, unmap)
        pool = self._memory_pool
        if not pool.has(nwords):
            context.extend(pool, step, _CHUNK_NBYTES, is_maker=is_maker)
        piece = pool.take(nwords)

        def give_back() -> None:
            if is_maker:
                pool.clear(piece)
            pool.give(piece)

        return PlanMemory(piece.view.cast("B"), piece.address, 8 * nwords, give_back)

    def close(self) -> None:
        del self.context.plan_ranks[self.group]
        if self.is_of_one_node:
            self.group.blocks.remove(self.context.agreement.block)
            self.group.free_unused()

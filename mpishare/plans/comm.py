"""The communicator of a plan, and the ranks and the memory that it shares with others."""

from __future__ import annotations

from copy import copy
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from mpishare.coordination.counters import SLOT_WORDS, CounterPool
from mpishare.coordination.life import Event
from mpishare.coordination.mpi_agreement import (
    agree,
    agree_keeping,
    duplicate,
    identify,
    known,
    ranks_in,
    wait_request,
    watching,
)
from mpishare.coordination.objects import Dropped
from mpishare.coordination.waits import WaitMonitor
from mpishare.errors import late_elsewhere
from mpishare.memory.shared import place

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mpi4py import MPI

    from mpishare.errors import MpiShareError, PeerTimeout
    from mpishare.runtime.context import NodeContext

    Array = np.ndarray[Any, Any]

T = TypeVar("T")

TAGS = 256
"""Tags of one plan: more than there are directions in a grid of four axes."""


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


class PlanComm:
    """The ranks of plans in some order, on a node, with a communicator of mpishare's own for them.

    Found once for all plans of a node, and kept until it closes. What a node that is over leaves
    under way is of no later one. Ranks for which the node was not made may be of nodes that are
    older and newer: their plans have a communicator each. A plan has a copy, whose messages have
    `TAGS` tags from `first_tag` on.
    """

    first_tag = -1  # of no plan

    def __init__(self, comm: MPI.Intracomm, context: NodeContext, replies: Sequence[Any]) -> None:
        self.comm, self.context = comm, context
        self.rank, self.size = comm.rank, comm.size
        self.ranks = frozenset(known(comm).items())  # the same for the same ranks in their order
        self.nodes: list[str] = [node for node, _, _ in replies]  # unique names, by rank
        self.places: list[Any] = [where for _, _, where in replies]
        mine = self.nodes[self.rank]
        # Ranks in the node by ranks in `comm`, for those on this node.
        self.ranks_here: dict[int, int] = {
            rank: rank_there for rank, (node, rank_there, _) in enumerate(replies) if node == mine
        }
        self.is_of_one_node = len(self.ranks_here) == len(replies)
        # Whether these are all ranks of the node, in its order.
        self.is_node = self.is_of_one_node and (
            [*self.ranks_here.items()] == [(r, r) for r in range(context.size)]
        )
        self.dropped = context.dropped if self.is_node else Dropped()
        self.tags_taken: set[int] = set()  # the first of each plan
        block = context.agreement.block
        self._memory_pool = block.plan_memory if self.is_node else CounterPool()

    @classmethod
    def of(cls, context: NodeContext, given: MPI.Intracomm, call: str) -> PlanComm:
        """Return the ranks of a communicator. Collective the first time, host-blocking."""
        agreement = context.agreement
        agreement.check()
        if not known(given):
            with watching(agreement, (), call) as watch:
                identify(given, watch)
        ranks, (*_, all_comm) = known(given), context.comms
        found: PlanComm | None = agreement.plan_comms.get(frozenset(ranks.items()))
        if found is None:
            with watching(agreement, ranks_in(agreement, given), call) as watch:
                comm = all_comm if known(all_comm) == ranks else duplicate(given, watch)
                mine = [context.nonces[0], context.rank, place()]
                found = cls(comm, context, agree(comm, lambda: mine, watch))
            if ranks.keys() <= known(all_comm).keys():
                agreement.plan_comms[found.ranks] = found
        return found

    def for_plan(self) -> PlanComm:
        """Return the copy of a new plan, with tags of its own: the same on all ranks.

        A plan that was abandoned keeps its tags.
        """
        made = copy(self)
        made.first_tag = next(tag for tag in count(0, TAGS) if tag not in self.tags_taken)
        self.tags_taken.add(made.first_tag)
        return made

    def for_part(self) -> PlanComm:
        """Return a copy for a part of the plan, which gets tags of its own."""
        made = copy(self)
        made.first_tag = PlanComm.first_tag
        return made

    def close(self) -> None:
        """End the plan, and what is kept for no other one. Collective, once all agree on that."""
        self.tags_taken.discard(self.first_tag)
        agreement = self.context.agreement
        if self.tags_taken:
            return
        if self.ranks not in agreement.plan_comms:
            self.free()
        elif agreement.kept is not None:
            agreement.kept[1].close()

    def free(self) -> None:
        """Free the communicator, unless it is that of the node. Collective."""
        if self.comm is not self.context.comms[-1]:
            self.comm.Free()

    def step(self, call: str, work: Callable[[], Any]) -> list[Any]:
        """Do `work`; return the results of all ranks, or raise on all. Collective."""
        return self.step_keeping(call, lambda: (None, work()))[1]

    def step_keeping(self, call: str, work: Callable[[], tuple[T, Any]]) -> tuple[T, list[Any]]:
        """Do a step as `Agreement.step_keeping`. Collective."""
        agreement = self.context.agreement
        if self.is_node:
            return agreement.step_keeping(call, work)
        agreement.begin_step(call)
        self.context.memory_barrier()
        with watching(agreement, self.ranks_here.values(), call) as watch:
            made = agree_keeping(self.comm, work, watch)
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
        with watching(self.context.agreement, self.ranks_here.values(), call) as watch:
            wait_request(request, watch, *memory)

    def take_memory(self, call: str, nbytes: int) -> PlanMemory:
        """Return zeroed host memory that the plan's ranks on this node share, and their GPUs.

        Small pieces come from memory that is mapped already. Collective over all, host-blocking.
        """

        def step(work: Callable[[], tuple[Any, Any]]) -> tuple[Any, list[Any]]:
            kept, replies = self.step_keeping(call, work)
            return kept, [replies[rank] for rank in self.ranks_here]

        context, is_maker = self.context, next(iter(self.ranks_here)) == self.rank
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

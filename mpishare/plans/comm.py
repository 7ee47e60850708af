"""The communicator of a plan, and the ranks and the memory that it shares with others."""

from __future__ import annotations

from functools import partial
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

    def __init__(self, ranks: PlanRanks) -> None:
        self._ranks = ranks
        self.context = ranks.context
        self.comm = ranks.comm
        self.rank, self.size = ranks.comm.rank, ranks.comm.size
        self.nodes, self.places = ranks.nodes, ranks.places
        self.is_of_one_node = ranks.is_of_one_node
        self.ranks_here = ranks.here  # their ranks in the node, by those in the plan
        self.dropped = ranks.dropped
        self.ranks = ranks.key  # the same for the same ranks in their order
        self._place = ranks.take_place()
        self.first_tag: int = TAGS * self._place

    def close(self) -> None:
        """End the plan. Collective, once all have agreed that it is closed."""
        self._ranks.give_place(self._place)

    def step(self, call: str, work: Callable[[], Any]) -> list[Any]:
        """Do `work`; return the results of all ranks, or raise on all. Collective."""
        return self.step_keeping(call, lambda: (None, work()))[1]

    def step_keeping(self, call: str, work: Callable[[], tuple[T, Any]]) -> tuple[T, list[Any]]:
        """Do a step as `Agreement.step_keeping`. Collective."""
        return self._ranks.step_keeping(call, work)

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
    """The ranks of plans in some order, on a node, with a communicator of mpishare's own for them.

    Found once for all plans of a node, and kept until it closes. What a node that is over leaves
    under way is of no later one. Ranks for which the node was not made may be of nodes that are
    older and newer: their plans have a communicator each.
    """

    def __init__(self, comm: MPI.Intracomm, context: NodeContext, replies: Sequence[Any]) -> None:
        self.comm, self.context = comm, context
        self.key = frozenset(known(comm).items())
        self.nodes: list[str] = [node for node, _, _ in replies]  # unique names, by rank
        self.places: list[Any] = [where for _, _, where in replies]
        mine = self.nodes[comm.rank]
        # Ranks in the node by ranks in `comm`, for those on this node.
        self.here: dict[int, int] = {
            rank: rank_there for rank, (node, rank_there, _) in enumerate(replies) if node == mine
        }
        self.is_of_one_node = len(self.here) == len(replies)
        # Whether these are all ranks of the node, in its order.
        self.is_node = self.is_of_one_node and (
            [*self.here.items()] == [(r, r) for r in range(context.size)]
        )
        self.dropped = context.dropped if self.is_node else Dropped()
        self.places_taken: set[int] = set()
        block = context.agreement.block
        self._memory_pool = block.plan_memory if self.is_node else CounterPool()

    @classmethod
    def of(cls, context: NodeContext, given: MPI.Intracomm, call: str) -> PlanRanks:
        """Return the ranks of a communicator. Collective the first time, host-blocking."""
        agreement = context.agreement
        agreement.check()
        if not known(given):
            with watching(agreement, (), call) as watch:
                identify(given, watch)
        ranks, (*_, all_comm) = known(given), context.comms
        found: PlanRanks | None = agreement.plan_ranks.get(frozenset(ranks.items()))
        if found is None:
            with watching(agreement, ranks_in(agreement, given), call) as watch:
                comm = all_comm if known(all_comm) == ranks else duplicate(given, watch)
                mine = [context.nonces[0], context.rank, place()]
                found = cls(comm, context, agree(comm, lambda: mine, watch))
            if ranks.keys() <= known(all_comm).keys():
                agreement.plan_ranks[found.key] = found
        return found

    def step_keeping(self, call: str, work: Callable[[], tuple[T, Any]]) -> tuple[T, list[Any]]:
        """Do a step as `Agreement.step_keeping`. Collective."""
        agreement = self.context.agreement
        if self.is_node:
            return agreement.step_keeping(call, work)
        agreement.begin_step(call)
        self.context.memory_barrier()
        with watching(agreement, self.here.values(), call) as watch:
            made = agree_keeping(self.comm, work, watch)
        self.context.memory_barrier()  # messages of MPI order no shared memory by themselves
        return made

    def take_place(self) -> int:
        """Return the number of a new plan among those that may send messages on `comm`.

        The same on all ranks. A plan that was abandoned keeps its own.
        """
        taken = self.places_taken
        place = next(n for n in range(len(taken) + 1) if n not in taken)
        taken.add(place)
        return place

    def give_place(self, place: int) -> None:
        self.places_taken.remove(place)

    def release(self) -> None:
        """Without a plan, close what is kept for no other one. Collective."""
        agreement = self.context.agreement
        if self.places_taken:
            return
        if self.key not in agreement.plan_ranks:
            self.close()
        elif agreement.kept is not None:
            agreement.kept[1].close()

    def close(self) -> None:
        """Free the communicator. Collective."""
        if self.comm is not self.context.comms[-1]:
            self.comm.Free()

    def take_memory(self, step: Steps, nbytes: int) -> PlanMemory:
        """Return zeroed host memory for these ranks on their node, and for their GPUs.

        Small pieces come from memory that is mapped already; else collective over them,
        host-blocking. `step` agrees with those ranks that are on this node.
        """
        context, is_maker = self.context, next(iter(self.here)) == self.comm.rank
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

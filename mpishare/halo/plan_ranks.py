"""The ranks of plans on one node: found out once, however many plans they make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from mpishare.coordination.counters import SLOT_WORDS, CounterPool
from mpishare.coordination.dropped import Dropped
from mpishare.memory.shared import place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.context import NodeContext
    from mpishare.coordination.rank_group import RankGroup
    from mpishare.memory.allocation import Steps
    from mpishare.memory.shared import SharedMemory


_MAX_POOLED_NBYTES = 1 << 17
_CHUNK_NBYTES = 1 << 18


class PlanMemory(NamedTuple):
    """Host memory of one plan, zeroed when it is taken.

    Attributes
    ----------
    buffer : memoryview of bytes
        As this process sees it.
    address : int
        Where the GPU of this rank sees it; 0 on the host backend.
    nbytes : int, bytes
        Its size.
    close : callable
        Gives it back, once no rank uses it. Local; to be called once, on all ranks of the node
        before any of them takes memory.
    """

    buffer: memoryview[int]
    address: int
    nbytes: int
    close: Callable[[], None]


class PlanRanks:
    """The ranks of a group, and which of them share the node of this rank. Made by `of`.

    Attributes
    ----------
    group : RankGroup
        Them all, by their ranks in the plan.
    context : NodeContext
        The node of this rank.
    nodes : list of str
        For each rank, the unique name of its node.
    places : list
        For each rank, its `place`.
    here : dict of int to int
        For each rank on this node, its rank in the node.
    is_node : bool
        Whether they are the ranks of this node, all of them in their order.
    dropped : Dropped
        The plans of these ranks.
    """

    def __init__(self, group: RankGroup, context: NodeContext, replies: Sequence[Any]) -> None:
        self.group = group
        self.context = context
        self.nodes: list[str] = [node for node, _, _ in replies]
        self.places: list[Any] = [where for _, _, where in replies]
        mine = self.nodes[group.comm.rank]
        self.here: dict[int, int] = {
            rank: rank_there for rank, (node, rank_there, _) in enumerate(replies) if node == mine
        }
        self.is_node = list(self.here.items()) == [(r, r) for r in range(context.size)] and (
            len(replies) == context.size
        )
        self.dropped = context.dropped if self.is_node else Dropped()
        self.regions: Any = None
        """Their `Regions` for staging buffers on CUDA, once a plan has needed them."""
        self._plans = 0
        block = context.agreement.block
        self._memory_pool = block.plan_memory if self.is_node else CounterPool()
        self._chunks: list[SharedMemory] = []

    @classmethod
    def of(
        cls,
        group: RankGroup,
        context: NodeContext,
        call: str,
        here: Sequence[Any],
        monitored: Callable[[], Any],
    ) -> PlanRanks:
        """Return the ranks of a group on a node. Collective the first time, host-blocking.

        Parameters
        ----------
        group, context, call
            Of the first plan.
        here : sequence
            What each rank has said of itself, if that is `_here`.
        monitored : callable
            Returns a context manager that watches the wait; see `MissingRanks`.
        """
        found: PlanRanks | None = context.plan_ranks.get(group)
        if found is None:
            if None in here:
                with monitored() as monitor:
                    timeout_s = context.agreement.timeout_s
                    here = group.agree(call, lambda: _here(context), timeout_s, monitor)
            found = context.plan_ranks[group] = cls(group, context, here)
            group.keep()
        return found

    def begin_plan(self) -> None:
        """Count one more plan."""
        self._plans += 1

    def end_plan(self) -> None:
        """Count one plan less. Collective with the last one of ranks on several nodes."""
        self._plans -= 1
        # Those of one node keep what they have for their next plan, until the node is closed; the
        # ranks of several nodes close these at different times.
        if not self._plans and len(self.here) < len(self.nodes):
            self.close()

    def take_memory(self, step: Steps, nbytes: int) -> PlanMemory:
        """Return zeroed host memory that these ranks share on their node, and their GPUs.

        Collective over the group where memory must be mapped, host-blocking then. Small pieces are
        parts of memory that is mapped already.

        Parameters
        ----------
        step : callable
            How the ranks of the group on this node agree.
        nbytes : int, bytes
            The size.
        """
        context, is_maker = self.context, next(iter(self.here)) == self.group.comm.rank
        nwords = max(SLOT_WORDS, 1 << (-(-nbytes // 8) - 1).bit_length())
        # Nodes may need different sizes: together they could not tell whether to map more.
        if 8 * nwords > _MAX_POOLED_NBYTES or len(self.here) < len(self.nodes):
            memory, address = context.map_registered(step, nbytes, is_maker=is_maker)
            return PlanMemory(
                memory.buffer, address, memory.nbytes, lambda: context.unmap_registered(memory)
            )
        pool = self._memory_pool
        if not pool.has(nwords):
            memory, address = context.map_registered(step, _CHUNK_NBYTES, is_maker=is_maker)
            self._chunks.append(memory)
            pool.add(memoryview(memory.buffer).cast("Q"), address)
        piece = pool.take(nwords)

        def give_back() -> None:
            if is_maker:
                pool.clear(piece)
            pool.give(piece)

        return PlanMemory(piece.view.cast("B"), piece.address, 8 * nwords, give_back)

    def close(self) -> None:
        """Give back what the plans shared. Collective."""
        if self.regions is not None:
            self.regions.close()
        for memory in self._chunks:
            self.context.unmap_registered(memory)
        del self.context.plan_ranks[self.group]
        self.group.drop()


def _here(context: NodeContext) -> list[Any]:
    """Return what tells where this rank is."""
    return [context.nonces[0], context.rank, place()]


def ranks_of_plan(group: RankGroup, context: NodeContext) -> tuple[list[Any] | None, list[int]]:
    """Return what this rank says for a new plan on a node that is there. Local.

    Returns
    -------
    here : list or None
        Where it is; None if the others know.
    news : list of int
        The plans of these ranks that it has dropped.
    """
    ranks: PlanRanks | None = context.plan_ranks.get(group)
    return (_here(context), []) if ranks is None else (None, context.news(ranks.dropped))

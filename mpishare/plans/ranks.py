"""The ranks of plans on one node, found once for all of their plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from mpishare.coordination.counters import SLOT_WORDS, CounterPool
from mpishare.coordination.missing_ranks import MissingRanks
from mpishare.coordination.objects import Dropped
from mpishare.memory.shared import place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.coordination.rank_group import RankGroup
    from mpishare.memory.allocation import Steps
    from mpishare.memory.shared import SharedMemory
    from mpishare.runtime.context import NodeContext


_MAX_POOLED_NBYTES = 1 << 17
_CHUNK_NBYTES = 1 << 18
_MAX_SPARE_NBYTES = 1 << 22
"""Memory of closed plans that is kept for later ones: to map it anew takes milliseconds."""


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
    """The ranks of a group, and those of them that share the node of this rank. Made by `of`."""

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
        # Whether these are all ranks of the node, in its order.
        self.is_node = list(self.here.items()) == [(r, r) for r in range(context.size)] and (
            len(replies) == context.size
        )
        self.dropped = context.dropped if self.is_node else Dropped()
        self.plans = 0
        block = context.agreement.block
        self._memory_pool = block.plan_memory if self.is_node else CounterPool()
        self._chunks: list[SharedMemory] = []
        self._spare: list[tuple[SharedMemory, int]] = []  # the newest last

    @classmethod
    def of(
        cls, group: RankGroup, context: NodeContext, call: str, here: Sequence[Any]
    ) -> PlanRanks:
        """Return the ranks of a group on a node. Collective the first time, host-blocking.

        `here` has each rank's `here_for_first_plan`.
        """
        found: PlanRanks | None = context.plan_ranks.get(group)
        if found is None:
            if None in here:
                with MissingRanks(context.agreement, (), call) as monitor:
                    timeout_s = context.agreement.timeout_s
                    _, here = group.step_keeping(
                        call, lambda: (None, _here(context)), timeout_s, monitor
                    )
            found = context.plan_ranks[group] = cls(group, context, here)
            group.keep()
            if len(found.here) == len(found.nodes):
                group.blocks.append(context.agreement.block)
        return found

    def end_plan(self) -> None:
        """Count one plan less. Collective with the last plan of ranks on several nodes."""
        self.plans -= 1
        # Ranks of one node keep memory for their next plan until the node closes; ranks of several
        # nodes close theirs at different times.
        if not self.plans and len(self.here) < len(self.nodes):
            self.close()

    def take_memory(self, step: Steps, nbytes: int) -> PlanMemory:
        """Return zeroed host memory for these ranks on their node, and for their GPUs.

        Small pieces come from memory that is mapped already; else collective over the group,
        host-blocking. `step` agrees with the ranks of the group on this node.
        """
        context, is_maker = self.context, next(iter(self.here)) == self.group.comm.rank
        nwords = max(SLOT_WORDS, 1 << (-(-nbytes // 8) - 1).bit_length())
        # Nodes may need different sizes, and could not agree whether to map more.
        if 8 * nwords > _MAX_POOLED_NBYTES or len(self.here) < len(self.nodes):
            return self._take_mapped(step, nbytes, is_maker=is_maker)
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

    def _take_mapped(self, step: Steps, nbytes: int, *, is_maker: bool) -> PlanMemory:
        """Return memory that has a mapping of its own, if it can be that of a closed plan."""
        fits = [each for each in self._spare if nbytes <= each[0].nbytes < 2 * nbytes]
        if fits:
            self._spare.remove(fits[-1])
        memory, address = (
            fits[-1] if fits else self.context.map_registered(step, nbytes, is_maker=is_maker)
        )

        def give_back() -> None:
            if len(self.here) < len(self.nodes) or memory.nbytes > _MAX_SPARE_NBYTES:
                self.context.unmap_registered(memory)
                return
            if is_maker:
                memory.buffer[:] = bytes(memory.nbytes)
            self._spare.append((memory, address))
            while sum(each.nbytes for each, _ in self._spare) > _MAX_SPARE_NBYTES:
                self.context.unmap_registered(self._spare.pop(0)[0])

        return PlanMemory(memory.buffer, address, memory.nbytes, give_back)

    def close(self) -> None:
        """Free memory that the plans shared. Collective."""
        for memory in (*self._chunks, *(memory for memory, _ in self._spare)):
            self.context.unmap_registered(memory)
        del self.context.plan_ranks[self.group]
        if len(self.here) == len(self.nodes):
            self.group.blocks.remove(self.context.agreement.block)
        self.group.drop()


def _here(context: NodeContext) -> list[Any]:
    """Return this rank's node, rank in it, and place."""
    return [context.nonces[0], context.rank, place()]


def here_for_first_plan(group: RankGroup, context: NodeContext) -> list[Any] | None:
    """Return this rank's `_here` for the first plan of a group on a node; None for later ones."""
    return None if group in context.plan_ranks else _here(context)

"""Route ``fused``: one launch for all such neighbors, faces and fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishare.plans.exchange.cuda.given_back import Copies
from mpishare.plans.exchange.cuda.kernels import THREADS
from mpishare.plans.exchange.cuda.records import (
    GET_LL,
    PACK,
    PACK_AND_ZERO,
    PUT_LL,
    PUT_LL_AND_ZERO,
    UNPACK,
)
from mpishare.plans.exchange.cuda.regions import added_regions
from mpishare.plans.exchange.cuda.work_items import LL_UNIT
from mpishare.plans.gpu.graphs import GraphCache
from mpishare.plans.message import ALIGN
from mpishare.runtime.route import FUSED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.plans.exchange.cuda.buffers import Buffers
    from mpishare.plans.exchange.cuda.direction import Direction
    from mpishare.plans.exchange.cuda.kernels import Launcher
    from mpishare.plans.exchange.cuda.work_items import WorkList

# Beside other work, half the blocks with half the threads fill the links as well.
_BLOCKS_DIVISOR_BESIDE = 2
_THREADS_BESIDE = 256


class Fused:
    """The launch between this rank and its fused neighbors.

    `alone` fills the GPU, `beside` is smaller, for `start`, beside other work. `alignments` are
    bytes, one for each field; graphs are captured on the stream `capturing`, and their handles
    published in the two dicts.
    """

    def __init__(
        self,
        direction: Direction,
        buffers: Buffers,
        launcher: Launcher,
        alignments: Sequence[int],
        capturing: int,
        handles: tuple[dict[Any, int], dict[Any, int]],
    ) -> None:
        work = launcher.work_list(alignments)
        if direction.gives_back:
            Copies(direction, buffers, work).add()
        else:
            self._add_parts(work, direction, buffers)
        self._is_ll, self._alignments = work.is_ll, alignments
        prepare = launcher.for_fused(work, buffers.flags.abort)

        def cache(blocks: int, threads: int, handles: dict[Any, int]) -> GraphCache:
            launch = prepare(blocks=blocks, threads=threads)
            return GraphCache(launcher.pointers, launcher.where, launch, capturing, handles)

        blocks = launcher.max_blocks
        self.alone = cache(blocks, THREADS, handles[0])
        self.beside = cache(max(1, blocks // _BLOCKS_DIVISOR_BESIDE), _THREADS_BESIDE, handles[1])

    @staticmethod
    def _add_parts(work: WorkList, direction: Direction, buffers: Buffers) -> None:
        by_flags, by_ll = (PACK_AND_ZERO, PUT_LL_AND_ZERO) if direction.adds else (PACK, PUT_LL)
        for key, part in direction.sent(FUSED):
            slot = buffers.slot(key, part)
            work.add_copy(by_flags if slot.flags else by_ll, part, slot)
        for peer in direction.peers(FUSED):
            if (flag := buffers.silent_flag(direction.rank, peer)) is not None:
                work.add_signal(PACK, flag)
        for peer in direction.peers(FUSED):
            if (flag := buffers.silent_flag(peer, direction.rank)) is not None:
                work.add_signal(UNPACK, flag, buffers.flags.stalled_on(peer))
        # This rank's own cells go along, which saves a launch.
        if direction.adds:
            for region, sources in added_regions(direction, buffers):
                work.add_region(region, sources)
            return
        for part, target in direction.local():
            work.add_local(part, target, shares_gpu=direction.shares_gpu(direction.rank))
        for key, part in direction.received(FUSED):
            slot = buffers.slot(key, part)
            work.add_copy(UNPACK if slot.flags else GET_LL, part, slot)

    def is_for(self, alignments: Sequence[int]) -> bool:
        """Whether these launches are right for fields of other alignments, too."""
        return self._is_ll and min([*alignments, *self._alignments], default=ALIGN) >= LL_UNIT

    def close(self) -> None:
        self.alone.close()
        self.beside.close()

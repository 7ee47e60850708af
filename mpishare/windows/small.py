"""Memory of small windows on hosts: blocks of one sparse file, with a region for each rank."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from mpishare.backends.host import HostBackend, HostBlock
from mpishare.backends.host_pool import Region
from mpishare.errors import UnsupportedError
from mpishare.memory.kinds import OF_WINDOW
from mpishare.memory.shared import map_on_all_ranks

if TYPE_CHECKING:
    from mpishare.memory.shared import SharedMemory
    from mpishare.runtime.context import NodeContext

_REGION_NBYTES = 16 << 20
_SMALL_NBYTES = 1 << 20
_STEP_NBYTES = 64 << 10  # little, since each rank of a node may have a region


class SmallBlocks:
    """Blocks that all ranks have mapped before they are allocated.

    So a window needs one agreement, and neither a file nor, from the second use of a block on, new
    pages.
    """

    refusal = OF_WINDOW

    def __init__(self, memory: SharedMemory, context: NodeContext) -> None:
        self._memory = memory
        start = context.rank * _REGION_NBYTES
        self._region = Region(memory, start, _REGION_NBYTES, _STEP_NBYTES)
        self.handle = context.handle("", 0, _SMALL_NBYTES, _SMALL_NBYTES)  # which opens nothing

    def has(self, address: int) -> bool:
        """Whether an address is in one of the blocks."""
        return 0 <= address - self._memory.address < self._memory.nbytes

    def allocate(self, nbytes: int) -> tuple[HostBlock | None, int | None]:
        """Return a block of this rank and its offset; None and None if it has no room for that."""
        at = None
        if nbytes <= _SMALL_NBYTES:
            with suppress(UnsupportedError):  # no pages are left: a file of its own may say it
                at = self._region.allocate(nbytes)
        if at is None:
            return None, None
        return HostBlock(self._memory, at, nbytes, partial(self._region.free, at, nbytes)), at

    def open(self, at: int, nbytes: int) -> HostBlock:
        """Return a block of another rank."""
        return HostBlock(self._memory, at, nbytes, int)


def small_blocks(context: NodeContext, call: str) -> SmallBlocks | None:
    """Return the blocks of a node, None on CUDA. The first call is collective, host-blocking."""
    if context.small_blocks is None and not context.backend.has_streams:
        step = partial(context.agreement.step_keeping, call)
        nbytes = context.size * _REGION_NBYTES
        memory = map_on_all_ranks(step, nbytes, is_maker=context.rank == 0, is_sparse=True)
        context.keep_mapped(memory)
        context.small_blocks = SmallBlocks(memory, context)
        HostBackend.cut.add(context.small_blocks)
    made: SmallBlocks | None = context.small_blocks
    return made

"""Staging buffers of small plans, as parts of a region that these ranks have mapped before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpishare.backends.suballocator import ALIGN, FreeList, Suballocation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.runtime.context import NodeContext

REGION_NBYTES = 256 << 10


class Regions:
    """A region of memory on the GPU of each rank, for all plans of these ranks.

    All ranks take parts in the same order, so they get the same offsets without communication.
    """

    def __init__(
        self,
        context: NodeContext,
        ranks_here: dict[int, int],
        mine: Suballocation,
        rank: int,
        handles: Sequence[str],
    ) -> None:
        self._context = context
        self._ranks_here = ranks_here
        self._handles = handles
        self._mapped = {rank: mine}
        self._mine = mine
        self._spans = FreeList(REGION_NBYTES)

    def take(self, nbytes: int) -> int | None:
        """Return the offset of a free part of that many bytes; None if there is none."""
        return self._spans.allocate(_rounded(nbytes))

    def give(self, offset: int, nbytes: int) -> None:
        """Give a part back, once no rank uses it."""
        self._spans.free(offset, _rounded(nbytes))

    def part(self, rank: int, offset: int, nbytes: int) -> Suballocation:
        """Return a part of a rank's region, mapped here."""
        if rank not in self._mapped:
            context = self._context
            handle = context.open_handle(self._handles[rank], self._ranks_here[rank], REGION_NBYTES)
            self._mapped[rank] = context.suballocator.open(handle)
        region = self._mapped[rank]
        return Suballocation(region.memory, region.offset + offset, nbytes, lambda: None)

    def close(self) -> None:
        """Free this rank's region, once no plan uses any of them."""
        self._mine.close()


def _rounded(nbytes: int) -> int:
    return -(-max(nbytes, 1) // ALIGN) * ALIGN

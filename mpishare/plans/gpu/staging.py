"""The memory of a plan on GPUs: staging buffers that its ranks map from each other, and flags."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishare.memory.handle import Handle
from mpishare.plans.gpu.flags import PinnedFlags

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from mpishare.backends.suballocator import Suballocation
    from mpishare.plans.comm import PlanComm


class PlanBuffers:
    """The staging buffer of this rank, mappings of those of its neighbors, and the plan's flags.

    With the flags comes pinned memory: see `PinnedFlags`. Collective to make; `create` and `undo`
    are, the other methods are local.
    """

    def __init__(
        self,
        comm: PlanComm,
        name: str,
        nbytes: dict[int, int],
        neighbors: Sequence[int],
        pinned_nbytes: int,
        streamed: Collection[int],
    ) -> None:
        self._comm, self._name = comm, name
        self._nbytes = nbytes
        self._neighbors = neighbors
        self._blocks: dict[int, Suballocation] = {}
        self._handles: list[str] = []
        self.flags = PinnedFlags(comm, name, pinned_nbytes, streamed)

    def create(self) -> None:
        """Allocate this rank's buffer, and get the handles of the others'. Collective."""
        self._handles = self._comm.step(self._name, self._allocate)

    def _allocate(self) -> str:
        """Return the handle of this rank's buffer; empty for none."""
        rank, context = self._comm.rank, self._comm.context
        if not self._nbytes[rank]:
            return ""
        block = self._blocks[rank] = context.suballocator.allocate(self._nbytes[rank])
        return context.handle(block.token, block.offset, block.nbytes, block.memory.nbytes)

    def attach(self, stream: int) -> None:
        """Zero this rank's buffer, on a stream, and map the neighbors'."""
        context, comm = self._comm.context, self._comm
        for rank in self._neighbors:
            if self._nbytes[rank]:
                handle = Handle.unpack(self._handles[rank])
                self._blocks[rank] = context.suballocator.open(handle)
        backend: Any = context.backend
        if mine := self._blocks.get(comm.rank):
            backend.zero(mine.address, mine.nbytes, stream)

    @property
    def nbytes(self) -> int:
        """Size of this rank's own buffers, and of the node's pinned memory."""
        mine = self._blocks.get(self._comm.rank)
        return self.flags.nbytes + (0 if mine is None else mine.nbytes)

    def address_of(self, rank: int) -> int:
        return self._blocks[rank].address

    def release(self) -> None:
        for rank in [rank for rank in self._blocks if rank != self._comm.rank]:
            self._blocks.pop(rank).close()

    def close(self) -> None:
        if self._comm.rank in self._blocks:
            self._blocks.pop(self._comm.rank).close()
        self.flags.close()

    def undo(self) -> None:
        """Free everything after a failure on all ranks. Collective."""

        def release() -> None:
            self._comm.context.drain(self._name)
            self.release()

        self._comm.step(self._name, release)
        self.close()

"""Staging buffers in GPU memory that the ranks of a plan map from each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.backends.suballocator import Suballocation
    from mpishare.plans.comm import PlanComm


class DeviceStaging:
    """The staging buffer of this rank, and mappings of those of its neighbors."""

    def __init__(self, comm: PlanComm, nbytes: dict[int, int], neighbors: Sequence[int]) -> None:
        self._comm = comm
        self._nbytes = nbytes
        self._neighbors = neighbors
        self._blocks: dict[int, Suballocation] = {}

    def create(self) -> str:
        """Allocate this rank's buffer, and return its handle."""
        rank, context = self._comm.rank, self._comm.context
        if not self._nbytes[rank]:
            return ""
        block, handle = context.suballocator.allocate(self._nbytes[rank], context.handle)
        self._blocks[rank] = block
        return handle

    def attach(self, handles: Sequence[str], stream: int) -> None:
        """Zero this rank's buffer, on a stream, and map the neighbors' by their handles."""
        context, comm = self._comm.context, self._comm
        for rank in (comm.rank, *self._neighbors):
            nbytes = self._nbytes[rank]
            if nbytes and rank != comm.rank:
                handle = context.open_handle(handles[rank], comm.ranks_here[rank], nbytes)
                self._blocks[rank] = context.suballocator.open(handle)
        backend: Any = context.backend
        if self._nbytes[comm.rank]:
            mine = self._blocks[comm.rank]
            backend.zero(mine.address, mine.nbytes, stream)

    @property
    def nbytes(self) -> int:
        mine = self._blocks.get(self._comm.rank)
        return 0 if mine is None else mine.nbytes

    def address_of(self, rank: int) -> int:
        """Return the address at which a rank's buffer is mapped here."""
        return self._blocks[rank].address

    def release(self) -> None:
        """Unmap the neighbors' buffers."""
        for rank in [rank for rank in self._blocks if rank != self._comm.rank]:
            self._blocks.pop(rank).close()

    def close(self) -> None:
        """Free this rank's buffer, once all ranks have released it."""
        if self._comm.rank in self._blocks:
            self._blocks.pop(self._comm.rank).close()

"""The buffers between the ranks of a reduction, in GPU memory or in pinned host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpishare.plans.gpu.staging import PlanBuffers

if TYPE_CHECKING:
    from mpishare.plans.comm import PlanComm


class Buffers(PlanBuffers):
    """A buffer per rank, of the same size, mapped by all.

    `in_host_memory`: pinned memory instead of each rank's GPU. `are_streamed`: streams wait for
    other ranks, not kernels.
    """

    def __init__(
        self, comm: PlanComm, name: str, nbytes: int, *, in_host_memory: bool, are_streamed: bool
    ) -> None:
        self._ranks = list(comm.ranks_here)
        self._row = nbytes if in_host_memory else 0
        others = [rank for rank in self._ranks if rank != comm.rank]
        of_gpu = dict.fromkeys(self._ranks, 0 if in_host_memory else nbytes)
        pinned_nbytes = self._row * len(self._ranks)
        super().__init__(comm, name, of_gpu, others, pinned_nbytes, others if are_streamed else [])

    def addresses(self, offset: int = 0) -> list[int]:
        """Return the address of each rank's buffer as mapped here, plus `offset` bytes."""
        if self._row:
            base = self.flags.staging_address
            return [base + place * self._row + offset for place in range(len(self._ranks))]
        return [self._staging.address_of(rank) + offset for rank in self._ranks]

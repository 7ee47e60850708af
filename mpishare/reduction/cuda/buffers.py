"""The buffers between the ranks of a reduction, in GPU memory or in pinned host memory, and
flags.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpishare.plans.gpu.flags import PinnedFlags
from mpishare.plans.gpu.staging import DeviceStaging

if TYPE_CHECKING:
    from mpishare.plans.comm import PlanComm


class Buffers:
    """A buffer per rank, of the same size, mapped by all. Collective to make and to `share`.

    `in_host_memory`: pinned memory instead of each rank's GPU. `are_streamed`: streams wait for
    other ranks, not kernels.
    """

    def __init__(
        self, comm: PlanComm, name: str, nbytes: int, *, in_host_memory: bool, are_streamed: bool
    ) -> None:
        self._comm, self._name = comm, name
        self._ranks = list(comm.ranks_here)
        self._row = nbytes if in_host_memory else 0
        others = [rank for rank in self._ranks if rank != comm.rank]
        of_gpu = 0 if in_host_memory else nbytes
        self._staging = DeviceStaging(comm, dict.fromkeys(self._ranks, of_gpu), others)
        self._handles: list[str] = []
        streamed = others if are_streamed else []
        self.flags = PinnedFlags(comm, name, self._row * len(self._ranks), streamed)

    def share(self) -> None:
        """Allocate memory that other ranks use. Collective."""
        self._handles = self._comm.step(self._name, self._staging.create)

    def attach(self) -> None:
        """Zero this rank's buffer, and map those of the others, after `share`."""
        self._staging.attach(self._handles, 0)

    @property
    def nbytes(self) -> int:
        """Size of this rank's buffer, and of the node's pinned memory."""
        return self._staging.nbytes + self.flags.nbytes

    def addresses(self, offset: int = 0) -> list[int]:
        """Return the address of each rank's buffer as mapped here, plus `offset` bytes."""
        if self._row:
            base = self.flags.staging_address
            return [base + place * self._row + offset for place in range(len(self._ranks))]
        return [self._staging.address_of(rank) + offset for rank in self._ranks]

    def release(self) -> None:
        """Unmap memory of other ranks."""
        self._staging.release()

    def close(self) -> None:
        """Free this rank's memory, once all ranks have released."""
        self._staging.close()
        self.flags.close()

    def undo(self) -> None:
        """Free everything after a failure on all ranks. Collective."""
        self._comm.step(self._name, self.release)
        self.close()

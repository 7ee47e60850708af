"""The buffers between the ranks of a reduction: in GPU memory, in pinned host memory, flags."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpishare.halo.cuda.flags import PinnedFlags
from mpishare.halo.cuda.staging import DeviceStaging

if TYPE_CHECKING:
    from mpishare.halo.plan_comm import PlanComm


class Buffers:
    """A buffer per rank, alike on all, which all others see. `share` is collective.

    Parameters
    ----------
    comm : PlanComm
        The ranks of the plan.
    name : str
        The plan's name, for errors.
    nbytes : int, bytes
        Size of each rank's buffer.
    in_host_memory : bool
        Where the buffers are: in pinned host memory, or in that of each rank's GPU.
    are_streamed : bool
        Whether streams wait for other ranks, not kernels.

    Attributes
    ----------
    flags : PinnedFlags
        The flags in host memory.
    """

    def __init__(
        self, comm: PlanComm, name: str, nbytes: int, *, in_host_memory: bool, are_streamed: bool
    ) -> None:
        self._comm, self._name = comm, name
        self._ranks = list(comm.ranks_here)
        self._row = nbytes if in_host_memory else 0
        others = [rank for rank in self._ranks if rank != comm.rank]
        of_gpu = 0 if in_host_memory else nbytes
        self._staging = DeviceStaging(comm, name, dict.fromkeys(self._ranks, of_gpu), others)
        streamed = others if are_streamed else []
        self.flags = PinnedFlags(comm, self._row * len(self._ranks), streamed)

    def share(self) -> None:
        """Allocate what other ranks use, and map theirs. Collective."""
        step, flags, staging = self._comm.step, self.flags, self._staging

        def create() -> str:
            flags.allocation.create()
            return staging.create()

        def attach() -> None:
            flags.attach(names)
            staging.open(handles)

        try:
            handles: list[str] = step(self._name, create)
            names: list[str] = step(self._name, flags.allocation.publish)
            step(self._name, attach)
        finally:
            flags.allocation.forget()

    @property
    def nbytes(self) -> int:
        """Size of this rank's buffer, and of the node's pinned memory."""
        return self._staging.nbytes + self.flags.nbytes

    def addresses(self, offset: int = 0) -> list[int]:
        """Return where each rank's buffer is mapped here, `offset` bytes further on."""
        if self._row:
            base = self.flags.staging_address
            return [base + place * self._row + offset for place in range(len(self._ranks))]
        return [self._staging.address_of(rank) + offset for rank in self._ranks]

    def release(self) -> None:
        """Unmap what other ranks own."""
        self._staging.release()

    def close(self) -> None:
        """Free what this rank owns, once all ranks have released."""
        self._staging.close()
        self.flags.close()

    def undo(self) -> None:
        """Free everything after a failure that all ranks know of. Collective."""
        self._comm.step(self._name, self.release)
        self.close()

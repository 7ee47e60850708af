"""The buffers of one direction of a plan on CUDA, and the address of each part in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishare.plans.exchange.cuda.mpi_buffers import MpiBuffers
from mpishare.plans.exchange.cuda.nccl_messages import NcclMessages
from mpishare.plans.exchange.cuda.staging import pinned_layout, silent_key, staging_layout
from mpishare.plans.exchange.cuda.work_items import Ghosts, Slot
from mpishare.plans.gpu.staging import PlanBuffers
from mpishare.runtime.route import COPY, FUSED, GPU_MESSAGES, MESSAGES, NCCL, PINNED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.plans.comm import PlanComm
    from mpishare.plans.exchange.cuda.direction import Direction
    from mpishare.plans.gpu.nccl import NcclPeers
    from mpishare.plans.message import Part, PartKey


class Buffers(PlanBuffers):
    def __init__(self, direction: Direction, comm: PlanComm, name: str) -> None:
        self._direction = direction
        neighbors, streamed = direction.peers(FUSED, COPY), direction.peers(COPY, PINNED)
        given = direction.messages, direction.routes, direction.ranks_here
        sharing, direct = direction.sharing, direction.direct.keys
        self._layouts = {
            rank: staging_layout(*given, rank, sharing, direct) for rank in (comm.rank, *neighbors)
        }
        self._pinned = pinned_layout(direction.messages, direction.ranks_here)
        nbytes = {rank: layout.nbytes for rank, layout in self._layouts.items()}
        super().__init__(comm, name, nbytes, neighbors, self._pinned.nbytes, streamed)
        self.mpi: MpiBuffers | None = None
        self.nccl: NcclMessages | None = None
        self._stalled_on = {peer: self.flags.stalled_on(peer) for peer in direction.peers(FUSED)}

    def make_messages(self, nccl: NcclPeers | None, pointers: Any) -> None:
        """Make the messages to ranks of other nodes, if there are any, of fields at `pointers`."""
        direction = self._direction
        if nccl is not None and any(direction.by(NCCL)):
            self.nccl = NcclMessages(self._comm, nccl.ranks, direction, pointers)
        if any(direction.by(MESSAGES, GPU_MESSAGES)):
            self.mpi = MpiBuffers(self._comm, self._name, direction)

    @property
    def nbytes(self) -> int:
        """Size of this rank's staging and MPI buffers, and of the node's pinned memory."""
        messages = [each.nbytes for each in (self.mpi, self.nccl) if each is not None]
        return super().nbytes + sum(messages)

    def slot(self, key: PartKey, part: Part) -> Slot:
        """Return the packed place of a part that this rank sends or receives; not for MPI."""
        direction = self._direction
        peer = key.receiver if key.sender == self._comm.rank else key.sender
        far = None
        if not (part.far is None and part.is_plain):
            far = part.seen(direction.layouts_by_rank[peer][part.far_field], is_far=True)
        route = direction.mine[peer]
        is_pinned = route is PINNED
        layout = self._pinned if is_pinned else self._layouts[key.receiver]
        base = self.flags.staging_address if is_pinned else self.address_of(key.receiver)
        place = base + layout.parts[key], layout.parity_offset
        if route is not FUSED:
            return Slot(*place, far=far)
        return Slot(
            *place,
            self._addresses_of_flags(key),
            self._ghosts_of(key),
            far,
            self._stalled_on[peer],
            shares_gpu=direction.shares_gpu(peer),
        )

    def silent_flag(self, sender: int, receiver: int) -> int | None:
        """Return the flag that a fused neighbor without parts stores; None if it has parts."""
        flags = self._addresses_of_flags(silent_key(sender, receiver))
        return flags[0] if flags else None

    def _ghosts_of(self, key: PartKey) -> Ghosts | None:
        offset = self._layouts[key.sender].ready.get(key)
        if offset is None:
            return None
        ready = self.address_of(key.sender) + offset
        return Ghosts(*self._direction.direct.ghosts(key), ready)

    def _addresses_of_flags(self, key: PartKey) -> Sequence[int]:
        offsets = self._layouts[key.receiver].flags.get(key)
        base = self.address_of(key.receiver)
        return [base + offset for offset in offsets] if offsets else ()

    def close(self) -> None:
        self._direction.direct.close()
        super().close()
        for messages in (self.mpi, self.nccl):
            if messages is not None:
                messages.close()
        self.mpi = self.nccl = None

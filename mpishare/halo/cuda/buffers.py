"""The buffers of one direction of a plan on CUDA, and the address of each part in them."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from mpishare.halo.cuda.mpi_in_place import MIN_IN_PLACE_NBYTES, InPlaceMessages
from mpishare.halo.cuda.mpi_stages import MpiStage
from mpishare.halo.cuda.pieces import MAX_STAGES, is_in_one_piece, split
from mpishare.halo.cuda.staging import silent_key
from mpishare.halo.cuda.work_items import Ghosts, Slot
from mpishare.plans.gpu.staging import PlanBuffers
from mpishare.plans.message import key_of_received, key_of_sent
from mpishare.runtime.route import COPY, FUSED, GPU_MESSAGES, PINNED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.halo.cuda.direction import Direction
    from mpishare.plans.comm import PlanComm
    from mpishare.plans.layout import FieldLayout
    from mpishare.plans.message import Message, Part, PartKey
    from mpishare.runtime.route import Route


class Buffers(PlanBuffers):
    """Flags, staging and MPI buffers."""

    def __init__(self, direction: Direction, comm: PlanComm, name: str) -> None:
        self._direction = direction
        self._layouts = direction.staging
        self._pinned, pinned_nbytes = direction.pinned
        nbytes = {rank: layout.nbytes for rank, layout in self._layouts.items()}
        neighbors, streamed = direction.peers(FUSED, COPY), direction.peers(COPY, PINNED)
        super().__init__(comm, name, nbytes, neighbors, pinned_nbytes, streamed)
        self.stages: list[MpiStage] = []
        self.unpacked: Any = None
        self.in_place: InPlaceMessages | None = None

    def make_mpi(self) -> None:
        """Make the messages to ranks of other nodes, if there are any."""
        each = self._direction
        on_gpu = GPU_MESSAGES in each.mine.values()
        sends, recvs = (
            [message for message in messages if each.mine[message.peer].is_of_mpi]
            for messages in (each.sends, each.recvs)
        )
        # Whole messages for sums: their order must not depend on the pieces.
        count = 1 if each.is_reverse else MAX_STAGES
        layouts, rank = each.layouts_by_rank, self._comm.rank
        cut = (split(part, layouts, rank, count, on_gpu=on_gpu) for part in (sends, recvs))
        for pieces in zip_longest(*cut, fillvalue=[]):
            self.stages.append(MpiStage(self._comm, self._name, *pieces, on_gpu=on_gpu))
        if self.stages:
            self.unpacked = self._comm.context.backend.local_event()
        if not on_gpu or each.is_reverse or len(self.stages) != 1:
            return
        messages = [*sends, *recvs]
        are_large = max(message.nbytes for message in messages) >= MIN_IN_PLACE_NBYTES
        if are_large and all(is_in_one_piece(message, each.layouts) for message in messages):
            self.in_place = InPlaceMessages(self._comm, self._name, sends, recvs, each.layouts)

    @property
    def nbytes(self) -> int:
        """Size of this rank's staging and MPI buffers, and of the node's pinned memory."""
        return super().nbytes + sum(stage.nbytes for stage in self.stages)

    def outgoing(self, message: Message, part: Part) -> Slot:
        """Return the packed place of a part to send; not for MPI."""
        route = self._direction.mine[message.peer]
        return self._slot(
            route, key_of_sent(self._comm.rank, message, part), self._far(message, part)
        )

    def incoming(self, message: Message, part: Part) -> Slot:
        """Return the packed place of a part to receive; not for MPI."""
        route = self._direction.mine[message.peer]
        key = key_of_received(self._comm.rank, message, part)
        return self._slot(route, key, self._far(message, part))

    def silent_flag(self, sender: int, receiver: int) -> int | None:
        """Return the flag that a fused neighbor without parts stores; None if it has parts."""
        flags = self._addresses_of_flags(silent_key(sender, receiver))
        return flags[0] if flags else None

    def _far(self, message: Message, part: Part) -> FieldLayout | None:
        if part.far is None:
            return None
        return self._direction.layouts_by_rank[message.peer][part.far]

    def _slot(self, route: Route, key: PartKey, far: FieldLayout | None) -> Slot:
        if route is PINNED:
            return Slot(self.flags.staging_address + self._pinned[key], far=far)
        layout = self._layouts[key.receiver]
        base = self._staging.address_of(key.receiver)
        if route is COPY:
            return Slot(base + layout.copied[key], far=far)
        flags = self._addresses_of_flags(key)
        ghosts = self._ghosts_of(key)
        return Slot(base + layout.fused[key], layout.parity_offset, flags, ghosts, far)

    def _ghosts_of(self, key: PartKey) -> Ghosts | None:
        offset = self._layouts[key.sender].ready.get(key)
        if offset is None:
            return None
        ready = self._staging.address_of(key.sender) + offset
        return Ghosts(*self._direction.direct.ghosts(key), ready)

    def _addresses_of_flags(self, key: PartKey) -> Sequence[int]:
        offsets = self._layouts[key.receiver].flags.get(key, ())
        return [self._staging.address_of(key.receiver) + offset for offset in offsets]

    def close(self) -> None:
        """Free this rank's memory, once all ranks have released."""
        self._direction.direct.close()
        super().close()
        self._close_mpi()

    def _close_mpi(self) -> None:
        if self.in_place is not None:
            self.in_place.close()
            self.in_place = None
        while self.stages:
            self.stages.pop().close()
        if self.unpacked is not None:
            self._comm.context.backend.close_events([self.unpacked])
            self.unpacked = None

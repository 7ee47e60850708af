"""The buffers of one direction of a plan on CUDA, and where in them each part lies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from mpishare.halo.cuda.flags import PinnedFlags
from mpishare.halo.cuda.fused_items import Place
from mpishare.halo.cuda.regions import REGION_NBYTES, Regions
from mpishare.halo.cuda.staging import DeviceStaging, silent_key
from mpishare.halo.cuda.work_items import Ghosts, Slot
from mpishare.halo.message import PartKey
from mpishare.halo.mpi_route import MpiMessages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.backends.suballocator import Suballocation
    from mpishare.halo.cuda.direction import Direction
    from mpishare.halo.engine import PlanSetup
    from mpishare.halo.message import Message, Part
    from mpishare.halo.plan_comm import PlanComm


class Buffers:
    """Flags, staging and MPI buffers.

    Collective to make; `create` and `undo` are, the other methods are local.

    Parameters
    ----------
    direction : Direction
        What is sent and received.
    comm : PlanComm
        The ranks of the plan.
    name : str
        The plan's name, for errors.

    Attributes
    ----------
    flags : PinnedFlags
        The flags in host memory.
    mpi : MpiBuffers or None
        The messages of route ``mpi``, once `make_mpi` has made them; None without any.
    """

    def __init__(self, direction: Direction, comm: PlanComm, name: str) -> None:
        self._direction, self._comm, self._name = direction, comm, name
        neighbors = direction.peers("fused", "copy")
        self._layouts = direction.staging
        self._pinned, pinned_nbytes = direction.pinned
        nbytes = {rank: layout.nbytes for rank, layout in self._layouts.items()}
        self._staging = DeviceStaging(comm, nbytes, neighbors)
        self.flags = PinnedFlags(comm, name, pinned_nbytes, direction.peers("copy", "pinned"))
        self.mpi: MpiBuffers | None = None
        self._handles: list[str] = []

    def create(self, setup: PlanSetup, *, is_reverse: bool) -> None:
        """Allocate the staging buffers, and learn where those of the others are.

        Collective, unless the ranks have regions with room, and one of them has told for an earlier
        plan like this how much is needed.
        """
        comm, known, name = self._comm, setup.said.known, f"staging, {is_reverse}"
        room, regions = known.get(name), comm.regions
        offset = None if room is None or regions is None else regions.take(room)
        if regions is not None and room is not None and offset is not None:
            self._staging.take(regions, offset, room)
            return
        mine: list[Suballocation] = []

        def allocate() -> list[Any]:
            nbytes = self._layouts[comm.rank].nbytes
            if regions is not None or not comm.is_of_one_node:
                return [self._staging.create(), nbytes, ""]
            context = comm.context
            region, handle = context.suballocator.allocate(REGION_NBYTES, context.handle)
            mine.append(region)
            return [self._staging.create(), nbytes, handle]

        try:
            replies = comm.step(self._name, allocate)
        except BaseException:
            for region in mine:
                region.close()
            raise
        if mine:
            handles = [handle for *_, handle in replies]
            comm.regions = Regions(comm.context, comm.ranks_here, mine[0], comm.rank, handles)
        known[name] = max(nbytes for _, nbytes, _ in replies)
        self._handles = [handle for handle, *_ in replies]

    def attach(self, stream: int) -> None:
        """Zero what this rank allocated, on a stream, and map what others did. Local."""
        self._staging.attach(self._handles, stream)

    def make_mpi(self) -> None:
        """Make the messages to ranks of other nodes, if there are any."""
        sends = [m for m in self._direction.sends if self._direction.mine[m.peer] == "mpi"]
        recvs = [m for m in self._direction.recvs if self._direction.mine[m.peer] == "mpi"]
        if sends or recvs:
            self.mpi = MpiBuffers(self._comm, self._name, sends, recvs)

    @property
    def nbytes(self) -> int:
        """Size of this rank's staging and MPI buffers, and of the node's pinned memory."""
        mpi = 0 if self.mpi is None else self.mpi.nbytes
        return self._staging.nbytes + mpi + self.flags.nbytes

    @property
    def place(self) -> Place:
        """Where the memory is that kernels of route ``fused`` use, once it is attached."""
        sizes = [(rank, layout.nbytes) for rank, layout in self._layouts.items() if layout.nbytes]
        staging = [(self._staging.address_of(rank), nbytes) for rank, nbytes in sizes]
        return Place(staging, self.flags.staging_address)

    def outgoing(self, message: Message, part: Part) -> Slot:
        """Return where a part of a message to a peer is packed."""
        route = self._direction.mine[message.peer]
        if route == "mpi" and self.mpi is not None:
            return Slot(self.mpi.outgoing(message, part))
        return self._slot(route, PartKey(self._comm.rank, message.peer, message.tag, part.field))

    def incoming(self, message: Message, part: Part) -> Slot:
        """Return where a part of a message from a peer arrives packed."""
        route = self._direction.mine[message.peer]
        if route == "mpi" and self.mpi is not None:
            return Slot(self.mpi.incoming(message, part))
        return self._slot(route, PartKey(message.peer, self._comm.rank, message.tag, part.field))

    def silent_flag(self, sender: int, receiver: int) -> int | None:
        """Return the flag that a fused neighbor without parts stores; None where it has parts."""
        flags = self._addresses_of_flags(silent_key(sender, receiver))
        return flags[0] if flags else None

    def _slot(self, route: str, key: PartKey) -> Slot:
        if route == "pinned":
            return Slot(self.flags.staging_address + self._pinned[key])
        layout = self._layouts[key.receiver]
        base = self._staging.address_of(key.receiver)
        if route == "copy":
            return Slot(base + layout.copied[key])
        flags = self._addresses_of_flags(key)
        return Slot(base + layout.fused[key], layout.parity_offset, flags, self._ghosts_of(key))

    def _ghosts_of(self, key: PartKey) -> Ghosts | None:
        offset = self._layouts[key.sender].ready.get(key)
        if offset is None:
            return None
        ready = self._staging.address_of(key.sender) + offset
        return Ghosts(*self._direction.direct.ghosts(key), ready)

    def _addresses_of_flags(self, key: PartKey) -> Sequence[int]:
        offsets = self._layouts[key.receiver].flags.get(key, ())
        return [self._staging.address_of(key.receiver) + offset for offset in offsets]

    def release(self) -> None:
        """Unmap what other ranks own."""
        self._staging.release()

    def close(self) -> None:
        """Free what this rank owns, once all ranks have released."""
        self._direction.direct.close()
        self._staging.close()
        self.flags.close()
        self._close_mpi()

    def undo(self) -> None:
        """Free everything after a failure that all ranks know of. Collective."""

        def release() -> None:
            self._comm.context.drain(self._name)
            self._close_mpi()
            self.release()

        self._comm.step(self._name, release)
        self.close()

    def _close_mpi(self) -> None:
        if self.mpi is not None:
            self.mpi.close()
            self.mpi = None


class MpiBuffers:
    """Messages of route ``mpi``, in pinned host memory that kernels pack to and unpack from. Local.

    All launches share them, whichever fields they are for.

    Parameters
    ----------
    comm, name
        As for `Buffers`.
    sends, recvs : sequence of Message
        What goes by MPI.

    Attributes
    ----------
    messages : MpiMessages
        The persistent requests.
    packed, unpacked : events
        Recorded when the outgoing buffers are full, and when the incoming ones are free again.
    nbytes : int, bytes
        Size of all messages.
    """

    def __init__(
        self, comm: PlanComm, name: str, sends: Sequence[Message], recvs: Sequence[Message]
    ) -> None:
        self._backend = comm.context.backend
        self._memory: list[Any] = []
        self._outgoing: dict[tuple[int, int], int] = {}
        self._incoming: dict[tuple[int, int], int] = {}
        outgoing = [self._allocate(self._outgoing, message) for message in sends]
        incoming = [self._allocate(self._incoming, message) for message in recvs]
        self.messages = MpiMessages(comm, name, sends, recvs, outgoing, incoming)
        self.nbytes = sum(message.nbytes for message in (*sends, *recvs))
        self.packed, self.unpacked = self._backend.local_event(), self._backend.local_event()

    def outgoing(self, message: Message, part: Part) -> int:
        """Return where a part is packed."""
        return self._outgoing[message.peer, message.tag] + message.offset_of(part)

    def incoming(self, message: Message, part: Part) -> int:
        """Return where a part arrives."""
        return self._incoming[message.peer, message.tag] + message.offset_of(part)

    def close(self) -> None:
        """Free the requests, the events and the memory."""
        self.messages.close()
        self._backend.close_events([self.packed, self.unpacked])
        self._memory = []

    def _allocate(
        self, addresses: dict[tuple[int, int], int], message: Message
    ) -> np.ndarray[Any, Any]:
        pinned = cupy.cuda.alloc_pinned_memory(max(message.nbytes, 1))
        self._memory.append(pinned)
        addresses[message.peer, message.tag] = int(pinned.ptr)
        return np.frombuffer(pinned, np.uint8, message.nbytes)

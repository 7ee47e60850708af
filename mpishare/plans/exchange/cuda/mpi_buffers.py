"""The MPI messages of a plan on GPUs, one per peer and direction, and their buffers.

Buffers are in GPU memory where the MPI takes that. Else they are in pinned host memory, and those
of small messages always: kernels reach it in less time than an MPI needs to fetch a few bytes from
a GPU. The two ends may differ in this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cupy

from mpishare.plans.exchange.cuda.work_items import Slot
from mpishare.plans.mpi_route import MpiMessages
from mpishare.runtime.route import GPU_MESSAGES, MESSAGES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.backends.suballocator import Suballocation
    from mpishare.plans.comm import PlanComm
    from mpishare.plans.exchange.cuda.direction import Direction
    from mpishare.plans.message import Message, Part

    Packed = list[tuple[Part, Slot]]
    """The parts of a message, each with its packed place."""


SMALL_NBYTES = 16 << 10
"""Messages up to this size go out of pinned memory."""


def places_in(message: Message, address: int) -> tuple[int, Packed]:
    """Return the bytes of a message packed at an address, and the place of each part.

    Without the padding behind the last part: the other end may have none.
    """
    offsets = message.offsets()
    places = (Slot(address + offset) for offset in offsets)
    return offsets[-1] + message.parts[-1].nbytes, [*zip(message.parts, places, strict=True)]


class MpiBuffers:
    """The messages and their buffers, shared by the launches for all fields.

    `sent` and `received` are the parts of each message, with their places in its buffer. The event
    `packed` follows the kernels that wrote them.
    """

    def __init__(self, comm: PlanComm, name: str, direction: Direction) -> None:
        from mpi4py import MPI

        self._backend = comm.context.backend
        self._suballocator = comm.context.suballocator
        self._on_gpu = GPU_MESSAGES in direction.mine.values()
        self._blocks: list[Suballocation] = []
        self._pinned: list[Any] = []

        def place(messages: Sequence[Message]) -> tuple[list[Any], list[Packed]]:
            buffers, packed = [], []
            for message in messages:
                address = self._allocate(max(message.nbytes, 1))
                nbytes, parts = places_in(message, address)
                packed.append(parts)
                buffers.append(MPI.buffer.fromaddress(address, nbytes))
            return buffers, packed

        sends, recvs = direction.by(MESSAGES, GPU_MESSAGES)
        (outgoing, self.sent), (incoming, self.received) = place(sends), place(recvs)
        self.messages = MpiMessages(comm, name, sends, recvs, outgoing, incoming)
        self.nbytes = sum(message.nbytes for message in (*sends, *recvs))
        self.packed = self._backend.local_event()

    def close(self) -> None:
        """Free requests, events and memory."""
        self.messages.close()
        self._backend.close_events([self.packed])
        for block in self._blocks:
            block.close()
        self._blocks, self._pinned = [], []

    def _allocate(self, nbytes: int) -> int:
        """Return the address of memory that is held until `close`."""
        if self._on_gpu and nbytes > SMALL_NBYTES:
            block = self._suballocator.allocate(nbytes)
            self._blocks.append(block)
            return block.address
        pinned = cupy.cuda.alloc_pinned_memory(nbytes)
        self._pinned.append(pinned)
        return int(pinned.ptr)

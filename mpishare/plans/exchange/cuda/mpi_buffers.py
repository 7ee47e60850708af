"""The MPI messages of a plan on GPUs, one per peer and direction, and their buffers.

Buffers are in GPU memory where the MPI takes that. Else they are in pinned host memory, and those
of small messages always: kernels reach it in less time than an MPI needs to fetch a few bytes from
a GPU. The two ends may differ in this. An MPI that takes pointers to GPU memory needs no buffers
for contiguous faces, as those of slabs are: they go straight out of fields, and into their ghosts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cupy

from mpishare.backends.driver import is_plain
from mpishare.plans.exchange.cuda.work_items import Slot
from mpishare.plans.gpu.graphs import key_of
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
MIN_IN_PLACE_NBYTES = 4 << 10
"""Packing smaller messages in pinned memory is faster than fetching them from a GPU by MPI."""
_MAX_BOUND = 64


def places_in(message: Message, address: int) -> tuple[int, Packed]:
    """Return the bytes of a message packed at an address, and the place of each part.

    Without the padding behind the last part: the other end may have none.
    """
    offsets = message.offsets()
    places = (Slot(address + offset) for offset in offsets)
    return offsets[-1] + message.parts[-1].nbytes, [*zip(message.parts, places, strict=True)]


class MpiBuffers:
    """The messages and their buffers, shared by the launches for all fields.

    `sent` and `received` are the parts of each message, with their places in its buffer. The events
    `packed` and `unpacked` follow the kernels that wrote and read these, and `in_place` has the
    messages of fields that need neither.
    """

    def __init__(self, comm: PlanComm, name: str, direction: Direction) -> None:
        from mpi4py import MPI

        self._backend = comm.context.backend
        self._suballocator = comm.context.suballocator
        self._on_gpu = on_gpu = GPU_MESSAGES in direction.mine.values()
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
        self.packed, self.unpacked = self._backend.local_event(), self._backend.local_event()
        self.in_place: InPlaceMessages | None = None
        if on_gpu and not direction.packs and _go_in_place([*sends, *recvs], direction):
            self.in_place = InPlaceMessages(comm, name, direction)

    def close(self) -> None:
        """Free requests and events, and the memory unless a message is under way."""
        if self.in_place is not None:
            self.in_place.close()
        is_over = self.messages.close([*self._blocks, *self._pinned])
        self._backend.close_events([self.packed, self.unpacked])
        if is_over:
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


class InPlaceMessages:
    """MPI messages of a plan that are all contiguous at this rank.

    `bound` has the persistent requests by `key_of` the fields' addresses; None where these fields
    must be packed.
    """

    def __init__(self, comm: PlanComm, name: str, direction: Direction) -> None:
        self._comm, self._name, self._layouts = comm, name, direction.layouts
        self._messages = direction.by(MESSAGES, GPU_MESSAGES)
        self.bound: dict[Any, MpiMessages | None] = {}

    def of(self, addresses: tuple[int, ...]) -> MpiMessages | None:
        """Return the messages of fields at these addresses, None if they must be packed."""
        key = key_of(addresses)
        if key in self.bound:
            return self.bound[key]
        if len(self.bound) == _MAX_BOUND:
            self._forget(next(iter(self.bound)))
        # MPIs are known to fail with memory of other allocators, or to stage it through the host.
        found = self._bind(addresses) if all(map(is_plain, addresses)) else None
        self.bound[key] = found
        return found

    def close(self) -> None:
        for key in [*self.bound]:
            self._forget(key)

    def _forget(self, key: Any) -> None:
        messages = self.bound.pop(key)
        if messages is not None:
            messages.close()

    def _bind(self, addresses: tuple[int, ...]) -> MpiMessages:
        from mpi4py import MPI

        def buffer(message: Message) -> Any:
            (part,) = message.parts
            address = addresses[part.field] + part.cells(self._layouts[part.field]).offset
            return MPI.buffer.fromaddress(address, part.nbytes)

        outgoing, incoming = ([*map(buffer, each)] for each in self._messages)
        return MpiMessages(self._comm, self._name, *self._messages, outgoing, incoming)


def _go_in_place(messages: Sequence[Message], direction: Direction) -> bool:
    """Whether MPI takes messages out of fields in less time than kernels pack them."""
    are_large = max(message.nbytes for message in messages) >= MIN_IN_PLACE_NBYTES
    return are_large and all(message.is_contiguous(direction.layouts) for message in messages)

"""MPI messages straight out of fields and into their ghosts, where nothing must be packed.

Faces of slabs are contiguous: an MPI that takes pointers to GPU memory needs no kernels for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishare.backends.driver import is_plain
from mpishare.plans.gpu.graphs import key_of
from mpishare.plans.mpi_route import MpiMessages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.plans.comm import PlanComm
    from mpishare.plans.layout import FieldLayout
    from mpishare.plans.message import Message

MIN_IN_PLACE_NBYTES = 4 << 10
"""Packing smaller messages in pinned memory is faster than fetching them from a GPU by MPI."""
_MAX_BOUND = 64


class InPlaceMessages:
    """MPI messages of a plan that are all contiguous at this rank: see `go_in_place`.

    `bound` has the persistent requests by `key_of` the fields' addresses; None where these fields
    must be packed.
    """

    def __init__(
        self,
        comm: PlanComm,
        name: str,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        layouts: Sequence[FieldLayout],
    ) -> None:
        self._comm, self._name, self._layouts = comm, name, layouts
        self._sends, self._recvs = sends, recvs
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

        def buffers(messages: Sequence[Message]) -> list[Any]:
            found = []
            for message in messages:
                (part,) = message.parts
                address = addresses[part.field] + part.cells(self._layouts[part.field]).offset
                found.append(MPI.buffer.fromaddress(address, part.nbytes))
            return found

        outgoing, incoming = buffers(self._sends), buffers(self._recvs)
        return MpiMessages(self._comm, self._name, self._sends, self._recvs, outgoing, incoming)


def go_in_place(messages: Sequence[Message], layouts: Sequence[FieldLayout]) -> bool:
    """Whether MPI takes messages out of fields in less time than kernels pack them."""
    are_large = max(message.nbytes for message in messages) >= MIN_IN_PLACE_NBYTES
    return are_large and all(message.is_contiguous(layouts) for message in messages)

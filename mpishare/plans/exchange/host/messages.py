"""Fields in host memory, packed by NumPy and sent by persistent requests of MPI.

Route ``mpi`` between nodes, and route ``host`` where C is missing or does not know the numbers: so
it is the reference of the compiled part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.plans.exchange.host.route import HostRoute
from mpishare.plans.mpi_route import MpiMessages
from mpishare.plans.wire import narrowed, off_wire, on_wire

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mpishare.plans.exchange.host.route import Array
    from mpishare.plans.message import Message, Part


class MessageRoute(HostRoute):
    def lay_out(self, sends: Sequence[Message], recvs: Sequence[Message]) -> None:
        setup = self._setup
        sends, recvs = (narrowed(each, setup.mine, setup.wire) for each in (sends, recvs))
        outgoing, incoming = (
            [np.empty(message.nbytes, np.uint8) for message in each] for each in (sends, recvs)
        )
        self._outgoing = [*self._packed(sends, outgoing)]
        self._incoming = [*self._packed(recvs, incoming)]
        ends = setup.name, sends, recvs, outgoing, incoming, setup.calls[0]
        self._messages = MpiMessages(setup.comm, *ends)
        self.staging_nbytes = sum(data.nbytes for data in (*outgoing, *incoming))

    def _packed(
        self, messages: Sequence[Message], buffers: Sequence[Array]
    ) -> Iterator[tuple[Part, Array]]:
        """Yield the parts of messages and their packed cells."""
        for message, buffer in zip(messages, buffers, strict=True):
            for part, offset in zip(message.parts, message.offsets(), strict=True):
                carrier = self._setup.mine[part.field].carrier
                packed = on_wire(np.empty(part.shape, carrier), self._setup.wire)
                yield part, np.ndarray(packed.shape, packed.dtype, buffer, offset)

    def start(self, arrays: Sequence[Array]) -> None:
        self._messages.receive()
        for _, place, key, cells in self._places(self._outgoing, arrays):
            cells[...] = on_wire(place[key], self._setup.wire)
        self._messages.send()

    def wait(self, arrays: Sequence[Array]) -> None:
        """Store or add the cells of all senders, in the order of the messages."""
        self._messages.wait()
        for part, place, key, packed in self._places(self._incoming, arrays):
            cells = off_wire(packed, self._setup.wire, place.dtype)
            cells = cells if part.factors is None else part.factors.of(cells)
            if self._setup.adds:
                add(place, key, cells)
            else:
                place[key] = cells
        for _, place, key, _ in self._places(self._outgoing, arrays) if self._setup.zeroes else ():
            place[key] = 0

    def _places(
        self, parts: Sequence[tuple[Part, Array]], arrays: Sequence[Array]
    ) -> Iterator[tuple[Part, Array, Any, Array]]:
        """Yield where the cells of each part lie at this call, and where they are packed."""
        shifts = self._setup.shifts.values
        for part, packed in parts:
            place, key = part.place(arrays[part.field], shifts)
            cells = packed if part.slide is None else packed[part.slide.room(shifts)]
            yield part, place, key, cells

    def close(self) -> None:
        if hasattr(self, "_messages"):
            self._messages.close()


def add(array: Array, key: Any, cells: Array) -> None:
    """Add the received cells; where an index occurs twice, both are added, in order."""
    if all(isinstance(item, slice) for item in key):
        target = array[key]
        np.add(target, cells, out=target)
    else:
        np.add.at(array, key, cells)

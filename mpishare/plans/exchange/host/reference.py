"""Route ``host`` in NumPy: the reference for the compiled part, and what stands in for it.

It stages all cells, by the same control words in the same memory, so that ranks with and without
the compiled part exchange with each other. It also adds numbers that C does not know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpishare.coordination.counters import NO_WORDS
from mpishare.plans.exchange.host.parts import RouteParts, lay_out
from mpishare.plans.exchange.host.route import HostRoute
from mpishare.plans.exchange.host.staging import CONSUMED, READY, Staging

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.plans.engine import RoutedSetup
    from mpishare.plans.exchange.host.route import Array
    from mpishare.plans.message import Message


class ReferenceRoute(HostRoute):
    """The messages of one plan between ranks of a node."""

    def __init__(self, setup: RoutedSetup) -> None:
        super().__init__(setup)
        self._rank = setup.comm.rank
        self._staging = Staging(setup)
        self._control = self._staging.control[self._rank]
        self._memory_barrier = setup.context.memory_barrier
        self._epoch = 0
        self.staging_nbytes = self._staging.nbytes

    def lay_out(self, sends: Sequence[Message], recvs: Sequence[Message]) -> None:
        self._sends = sends
        self._receivers = sorted({message.peer for message in sends} - {self._rank})
        self._parts = lay_out(self._setup, sends, recvs, self._staging, may_read=False)

    def start(self, arrays: Sequence[Array]) -> None:
        """Pack my cells; waits only for a rank two epochs behind."""
        epoch = self._epoch + 1
        self._staging.wait_until(self._receivers, CONSUMED, epoch - 2)
        self._memory_barrier()
        for part in self._parts.outgoing:
            if part.buffers is not None:
                part.buffers[epoch & 1][...] = arrays[part.field][part.key]
        self._publish(READY, epoch)
        self._epoch = epoch

    def wait(self, arrays: Sequence[Array]) -> None:
        """Copy or add the cells of all senders, in the order of the messages."""
        epoch = self._epoch
        for sender, parts in self._parts.senders:
            if sender != self._rank:
                self._staging.wait_until((sender,), READY, epoch)
                self._memory_barrier()
            for part in parts:
                cells = (
                    arrays[part.name.field][part.source_key]
                    if part.buffers is None
                    else part.buffers[epoch & 1]
                )
                self.store(arrays[part.field], part.key, cells)
        self._publish(CONSUMED, epoch)
        if self._adds:
            self.zero(self._sends, arrays)

    def _publish(self, word: int, epoch: int) -> None:
        self._memory_barrier()
        self._control[word] = epoch

    def close(self) -> None:
        self._control = NO_WORDS
        self._parts = RouteParts([], [], [], [])  # views of the memory
        self._staging.close()

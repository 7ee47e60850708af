"""Route ``host`` in NumPy: the reference for the compiled part, and what stands in for it.

It stages all cells, by the same control words in the same memory, so that ranks with and without
the compiled part exchange with each other. It also adds numbers that C does not know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpishare.halo.host.copies import add, put
from mpishare.halo.host.parts import RouteParts, lay_out
from mpishare.halo.host.staging import CONSUMED, READY, Staging

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.halo.host.copies import HostCall
    from mpishare.plans.engine import RoutedSetup
    from mpishare.plans.message import Message


class ReferenceRoute:
    """The messages of one plan between ranks of a node. Collective to make, host-blocking.

    It is complete after `lay_out`, which may fail on one rank.
    """

    def __init__(self, setup: RoutedSetup, *, is_reverse: bool) -> None:
        self._setup, self._rank = setup, setup.comm.rank
        self._is_reverse = is_reverse
        self._store = add if is_reverse else put
        self._staging = Staging(setup, is_reverse=is_reverse)
        self._control = self._staging.control[self._rank]
        self._memory_barrier = setup.context.memory_barrier
        self._epoch = 0
        self.staging_nbytes = self._staging.nbytes

    def lay_out(self, sends: Sequence[Message], recvs: Sequence[Message]) -> None:
        """Find the buffers of all parts, those of this rank to itself included. Local."""
        self._receivers = sorted({message.peer for message in sends} - {self._rank})
        self._parts = lay_out(
            self._setup, sends, recvs, self._staging, is_reverse=self._is_reverse, may_read=False
        )
        self._sent = [part for message in sends for part in message.parts]

    def ahead(self) -> list[int]:
        """Ranks of the node that have started more exchanges than this one."""
        return self._staging.ahead(self._epoch)

    def start(self, call: HostCall) -> None:
        """Pack my cells; waits only for a rank two epochs behind."""
        epoch = self._epoch + 1
        self._staging.wait_until(self._receivers, CONSUMED, epoch - 2)
        self._memory_barrier()
        for part in self._parts.outgoing:
            if part.buffers is not None:
                part.buffers[epoch & 1][...] = call.arrays[part.field][part.key]
        self._publish(READY, epoch)
        self._epoch = epoch

    def wait(self, call: HostCall) -> None:
        """Copy or add the cells of all senders, in the order of the messages."""
        epoch, arrays = self._epoch, call.arrays
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
                self._store(arrays[part.field], part.key, cells)
        self._publish(CONSUMED, epoch)
        if self._is_reverse:
            for sent in self._sent:
                arrays[sent.field][sent.key] = 0

    def _publish(self, word: int, epoch: int) -> None:
        self._memory_barrier()
        self._control[word] = epoch

    def close(self) -> None:
        """Unmap the shared memory."""
        self._control = memoryview(b"").cast("Q")
        self._parts = RouteParts([], [], [], [])  # views of the memory
        self._staging.close()

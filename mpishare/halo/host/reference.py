"""Route ``host`` in NumPy: the reference for the compiled part, and what stands in for it.

It stages all cells, by the same control words in the same memory, so that ranks with and without
the compiled part exchange with each other. It also adds numbers that C does not know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from mpishare.halo.host.copies import add, put
from mpishare.halo.host.staging import CONSUMED, READY, Staging
from mpishare.plans.message import received, sent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.halo.host.copies import Array, HostCall
    from mpishare.plans.engine import RoutedSetup
    from mpishare.plans.message import Message, Part, PartKey


class _Part(NamedTuple):
    """Cells of a field, and their packed copies in even and in odd epochs."""

    name: PartKey
    field: int
    key: Any
    buffers: tuple[Array, Array] | None  # None: between cells of this rank


class ReferenceRoute:
    """The messages of one plan between ranks of a node. Collective to make, host-blocking.

    It is complete after `lay_out`, which may fail on one rank.
    """

    def __init__(self, setup: RoutedSetup, *, is_reverse: bool) -> None:
        self._rank = setup.comm.rank
        self._is_reverse = is_reverse
        self._store = add if is_reverse else put
        self._staging = Staging(setup, is_reverse=is_reverse)
        self._control = self._staging.control[self._rank]
        self._memory_barrier = setup.context.memory_barrier
        self._epoch = 0
        self.staging_nbytes = self._staging.nbytes

    def lay_out(self, sends: Sequence[Message], recvs: Sequence[Message]) -> None:
        """Find the buffers of all parts, those of this rank to itself included. Local."""
        mine = self._rank
        self._receivers = sorted({message.peer for message in sends} - {mine})
        self._outgoing = [self._part(*each) for each in sent(sends, mine)]
        self._incoming = [self._part(*each) for each in received(recvs, mine)]
        self._own = {part.name: part.key for part in self._outgoing if part.buffers is None}

    def _part(self, name: PartKey, part: Part) -> _Part:
        return _Part(name, part.field, part.key, self._staging.buffers(name, part.shape))

    def ahead(self) -> list[int]:
        """Ranks of the node that have started more exchanges than this one."""
        return self._staging.ahead(self._epoch)

    def start(self, call: HostCall) -> None:
        """Pack my cells; waits only for a rank two epochs behind."""
        epoch = self._epoch + 1
        self._staging.wait_until(self._receivers, CONSUMED, epoch - 2)
        self._memory_barrier()
        for _, field, key, buffers in self._outgoing:
            if buffers is not None:
                buffers[epoch & 1][...] = call.arrays[field][key]
        self._publish(READY, epoch)
        self._epoch = epoch

    def wait(self, call: HostCall) -> None:
        """Copy or add the cells of all senders, in the order of the messages."""
        epoch, arrays = self._epoch, call.arrays
        for name, field, key, buffers in self._incoming:
            array = arrays[field]
            if buffers is None:
                self._store(array, key, arrays[name.field][self._own[name]])
            else:
                self._staging.wait_until((name.sender,), READY, epoch)
                self._memory_barrier()
                self._store(array, key, buffers[epoch & 1])
        self._publish(CONSUMED, epoch)
        if self._is_reverse:
            for _, field, key, _ in self._outgoing:
                arrays[field][key] = 0

    def _publish(self, word: int, epoch: int) -> None:
        self._memory_barrier()
        self._control[word] = epoch

    def close(self) -> None:
        """Unmap the shared memory."""
        self._control = memoryview(b"").cast("Q")
        self._outgoing, self._incoming = [], []
        self._staging.close()

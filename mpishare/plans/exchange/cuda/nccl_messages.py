"""The messages of a plan on GPUs that NCCL takes to other nodes, on the stream of the call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpishare.plans.exchange.cuda.mpi_buffers import places_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.backends.nccl import Move
    from mpishare.backends.suballocator import Suballocation
    from mpishare.plans.comm import PlanComm
    from mpishare.plans.exchange.cuda.mpi_buffers import Packed
    from mpishare.plans.gpu.nccl import NcclRanks
    from mpishare.plans.message import Message


class NcclMessages:
    """Packed messages in GPU memory, all sent and received by one kernel.

    `sent` and `received` are the parts of each message, with their places. The buffers need no
    second half as those of streams that wait by flags: all three kernels of a call follow those of
    the call before.
    """

    def __init__(
        self,
        comm: PlanComm,
        ranks: NcclRanks,
        sends: Sequence[Message],
        recvs: Sequence[Message],
    ) -> None:
        self._suballocator = comm.context.suballocator
        self._blocks: list[Suballocation] = []
        moves_out, self.sent = self._place(sends)
        moves_in, self.received = self._place(recvs)
        self.enqueue = ranks.bind(moves_out, moves_in)
        """Send what is packed, and receive, on a stream."""
        self.nbytes = sum(block.nbytes for block in self._blocks)

    def close(self) -> None:
        while self._blocks:
            self._blocks.pop().close()

    def _place(self, messages: Sequence[Message]) -> tuple[list[Move], list[Packed]]:
        """Return what moves, and where its parts are packed; the order is that of both ends."""
        moves, packed = [], []
        for message in sorted(messages, key=lambda message: message.tag):
            block = self._suballocator.allocate(max(message.nbytes, 1))
            self._blocks.append(block)
            nbytes, parts = places_in(message, block.address)
            moves.append((block.address, nbytes, message.peer))
            packed.append(parts)
        return moves, packed

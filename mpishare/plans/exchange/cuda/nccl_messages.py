"""The messages of a plan on GPUs that NCCL takes to other nodes, on the stream of the call."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mpishare.backends.nccl import NcclError
from mpishare.coordination.life import Event
from mpishare.errors import PeerError, name_ranks
from mpishare.plans.exchange.cuda.work_items import Slot
from mpishare.plans.gpu.nccl import NcclRanks
from mpishare.runtime.route import NCCL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.backends.nccl import Move
    from mpishare.backends.suballocator import Suballocation
    from mpishare.errors import PeerTimeout
    from mpishare.plans.comm import PlanComm
    from mpishare.plans.engine import RoutedSetup
    from mpishare.plans.exchange.cuda.direction import Direction
    from mpishare.plans.exchange.cuda.mpi_buffers import Packed
    from mpishare.plans.gpu.flags import PinnedFlags
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
        self._ranks = ranks
        self._suballocator = comm.context.suballocator
        self._blocks: list[Suballocation] = []
        self._sends, self.sent = self._place(sends)
        self._recvs, self.received = self._place(recvs)
        self.nbytes = sum(block.nbytes for block in self._blocks)

    def enqueue(self, stream: int) -> None:
        """Send what is packed, and receive, on a stream."""
        self._ranks.group(self._sends, self._recvs, stream)

    def close(self) -> None:
        while self._blocks:
            self._blocks.pop().close()

    def _place(self, messages: Sequence[Message]) -> tuple[list[Move], list[Packed]]:
        """Return what moves, and where its parts are packed; the order is that of both ends."""
        moves, packed = [], []
        for message in sorted(messages, key=lambda message: message.tag):
            offsets = message.offsets()
            # Without the padding behind the last part: the other end may have none.
            nbytes = offsets[-1] + message.parts[-1].nbytes
            block = self._suballocator.allocate(max(nbytes, 1))
            self._blocks.append(block)
            moves.append((block.address, nbytes, message.peer))
            places = (Slot(block.address + offset) for offset in offsets)
            packed.append([*zip(message.parts, places, strict=True)])
        return moves, packed


class NcclWatch:
    """The ranks that one direction of a plan reaches by NCCL, connected and watched.

    Collective to make, host-blocking. `ranks` is None where no rank of the plan reaches any so.
    """

    def __init__(self, setup: RoutedSetup, direction: Direction) -> None:
        self.peers = direction.peers(NCCL)
        self.ranks: NcclRanks | None = None
        self._comm, self._call = setup.comm, setup.full_call
        self._done, self._since = 0, time.monotonic()
        if any(NCCL in routes.values() for routes in setup.routes):
            self.ranks = NcclRanks.of(setup.comm, setup.name)
            self.ranks.connect(setup.comm, setup.name, self.peers)

    def check(self, flags: PinnedFlags) -> None:
        """End the node where a peer is lost, or a call takes longer than the deadline.

        No host waits for these messages, so the watchdog does, in its thread.
        """
        if self.ranks is None or not self.peers:
            return
        agreement, now = self._comm.context.agreement, time.monotonic()
        try:
            self.ranks.check()
        except NcclError as error:
            lost = dict.fromkeys(self.peers, str(error))
            text = f"{self._call} failed: NCCL has lost {name_ranks(self.peers)}: {error}"
            agreement.end(Event.DEPARTURE, PeerError(text, failures=lost))
        done, is_under_way = flags.calls_done() if flags.calls else (0, False)
        if done != self._done or not is_under_way:
            self._done, self._since = done, now
        elif now - self._since > agreement.timeout_s:
            agreement.end(Event.DEADLINE, self._comm.late(self._call, self.peers))

    def late(self, call: str, flags: PinnedFlags) -> PeerTimeout | None:
        """Return the error of the peers, if this rank's stream waits for one of them."""
        is_waiting = bool(self.peers) and flags.calls_done()[1]
        return self._comm.late(call, self.peers) if is_waiting else None

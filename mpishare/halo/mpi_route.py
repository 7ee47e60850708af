"""Route ``mpi``, the part that is the same everywhere: messages in buffers of this process.

The requests are persistent: what does not change from one exchange to the next is told to MPI once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.coordination.mpi_agreement import never_free
from mpishare.coordination.poll import poll
from mpishare.coordination.waits import WaitMonitor
from mpishare.errors import PeerTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.coordination.agreement import Agreement
    from mpishare.errors import MpiShareError
    from mpishare.halo.layout import Layout
    from mpishare.halo.message import Message
    from mpishare.halo.plan_comm import PlanComm

    Array = np.ndarray[Any, Any]
    Packed = list[tuple[int, Any, Array]]  # field, what to index, the packed cells


class MpiMessages:
    """The messages of one plan that go by MPI. Local.

    Parameters
    ----------
    ranks : PlanComm
        The plan's.
    name : str
        The plan's, for errors.
    sends, recvs : sequence of Message
        What goes by MPI.
    outgoing, incoming : sequence of numpy.ndarray of uint8
        Their packed bytes, one buffer each.
    """

    def __init__(
        self,
        ranks: PlanComm,
        name: str,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        outgoing: Sequence[np.ndarray[Any, Any]],
        incoming: Sequence[np.ndarray[Any, Any]],
    ) -> None:
        from mpi4py import MPI

        comm = ranks.comm
        self._ranks = ranks
        self._name = name
        self._startall = MPI.Prequest.Startall
        self._testall = MPI.Request.Testall
        self._buffers = [*outgoing, *incoming]
        self._sends = [
            comm.Send_init(data, message.peer, message.tag)
            for message, data in zip(sends, outgoing, strict=True)
        ]
        self._recvs = [
            comm.Recv_init(data, message.peer, message.tag)
            for message, data in zip(recvs, incoming, strict=True)
        ]
        self._requests = [*self._recvs, *self._sends]
        self._peers = [message.peer for message in (*recvs, *sends)]
        self._is_open = False

    def receive(self) -> None:
        """Let messages come in; before the senders can have sent them, if possible."""
        self._startall(self._recvs)
        self._is_open = True

    def send(self) -> None:
        """Let the packed messages go."""
        self._startall(self._sends)

    def finish(self) -> None:
        """Wait on the host until all have gone and all have come, with the deadline."""
        agreement = self._ranks.context.agreement
        ranks_here, call = self._ranks.ranks_here, f"{self._name}: wait"

        def pending() -> list[int]:
            return [ranks_here[rank] for rank in self._missing() if rank in ranks_here]

        with WaitMonitor(agreement, call, pending) as monitor:

            def look() -> None:
                agreement.check()
                monitor.look()

            def is_done() -> bool:
                return self._testall(self._requests)

            if not poll(is_done, agreement.timeout_s, look, warn=monitor.warn):
                raise self._lost(agreement)
        self._is_open = False

    def close(self) -> None:
        """Free the requests. Local; those that are still under way are left to MPI."""
        if self._is_open:
            never_free(self._requests, self._buffers)
        else:
            for request in self._requests:
                request.Free()
        self._requests, self._sends, self._recvs, self._buffers = [], [], [], []

    def _missing(self) -> list[int]:
        """Ranks of the plan whose messages have not come, or that have not taken mine."""
        waits = zip(self._peers, self._requests, strict=True)
        return sorted({rank for rank, request in waits if not request.Test()})

    def _lost(self, agreement: Agreement) -> MpiShareError:
        timeout_s = agreement.timeout_s
        missing, ranks_here = self._missing(), self._ranks.ranks_here
        here = [ranks_here[rank] for rank in missing if rank in ranks_here]
        call = f"{self._name}: wait"
        if len(here) == len(missing):
            return agreement.timed_out(call, here, timeout_s)
        error = PeerTimeout(
            f"{call} failed: ranks {missing} of the plan's communicator did not arrive within "
            f"{timeout_s:g} s (rank {self._ranks.rank} of {self._ranks.size}). The node cannot be "
            "used any more.",
            ranks=here,
            timeout_s=timeout_s,
        )
        return agreement.fail_and_tell(lambda: error, fatal=True, missing=error.ranks)


class MpiRoute:
    """The messages of one plan to ranks of other nodes. Local.

    Parameters
    ----------
    ranks, name, land
        As `HostRoute`.
    layouts : sequence of Layout
        This rank's fields'.
    sends, recvs : sequence of Message
        What goes by this route.
    """

    def __init__(
        self,
        ranks: PlanComm,
        name: str,
        layouts: Sequence[Layout],
        sends: Sequence[Message],
        recvs: Sequence[Message],
        land: Callable[[Array, Any, Array], None],
    ) -> None:
        self._land = land
        outgoing = [np.empty(message.nbytes, np.uint8) for message in sends]
        incoming = [np.empty(message.nbytes, np.uint8) for message in recvs]
        self._packs = _packed(layouts, sends, outgoing)
        self._takes = _packed(layouts, recvs, incoming)
        self._mail = MpiMessages(ranks, name, sends, recvs, outgoing, incoming)
        self.staging_nbytes = sum(data.nbytes for data in (*outgoing, *incoming))

    def start(self, arrays: Sequence[Array]) -> None:
        """Pack and send; does not wait."""
        self._mail.receive()
        for field, key, cells in self._packs:
            cells[...] = arrays[field][key]
        self._mail.send()

    def wait(self, arrays: Sequence[Array]) -> None:
        """Wait for all messages, then unpack."""
        self._mail.finish()
        for field, key, cells in self._takes:
            self._land(arrays[field], key, cells)

    def close(self) -> None:
        """Free the requests. Local."""
        self._mail.close()


def _packed(
    layouts: Sequence[Layout], messages: Sequence[Message], buffers: Sequence[Array]
) -> Packed:
    return [
        (
            part.field,
            part.key,
            np.ndarray(part.shape, layouts[part.field].carrier, buffer=buffer, offset=offset),
        )
        for message, buffer in zip(messages, buffers, strict=True)
        for part, offset in zip(message.parts, message.offsets(), strict=True)
    ]

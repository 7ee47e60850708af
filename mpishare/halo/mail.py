"""Route ``mpi``, the part that is the same everywhere: messages in buffers of this process.

The requests are persistent: what does not change from one exchange to the next is told to MPI once.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from mpishare.errors import PeerTimeout
from mpishare.messages import give_up
from mpishare.waits import LongWait

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from mpishare.agree import Agreement
    from mpishare.errors import MpiShareError
    from mpishare.halo.message import Message
    from mpishare.halo.ranks import Ranks


class Mail:
    """The messages of one plan that go by MPI. Local.

    Parameters
    ----------
    ranks : Ranks
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
        ranks: Ranks,
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
        agreement = self._ranks.ground.agreement
        team, call = self._ranks.team, f"{self._name}: wait"
        watch = LongWait(agreement, call)
        try:
            while not self._testall(self._requests):
                os.sched_yield()
                agreement.check()
                if watch.since_s() > agreement.timeout_s and not self._testall(self._requests):
                    raise self._lost(agreement)
                watch.look(lambda: [team[rank] for rank in self._missing() if rank in team])
        finally:
            watch.end()
        self._is_open = False

    def close(self) -> None:
        """Free the requests. Local; those that are still under way are left to MPI."""
        if self._is_open:
            give_up(self._requests, self._buffers)
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
        missing, team = self._missing(), self._ranks.team
        here = [team[rank] for rank in missing if rank in team]
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
        return agreement.lose(lambda: error, fatal=True, missing=error.ranks)

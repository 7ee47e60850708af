"""Route ``mpi``: the persistent MPI requests of packed messages in any memory."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.plans.comm import PlanComm
    from mpishare.plans.message import Message


class MpiMessages:
    """The persistent MPI requests of one plan, between packed bytes in any memory."""

    def __init__(
        self,
        comm: PlanComm,
        name: str,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        outgoing: Sequence[Any],
        incoming: Sequence[Any],
        call: str = "wait",
    ) -> None:
        from mpi4py import MPI

        self._comm = comm
        self._call = f"{name}: {call}"
        self._startall = MPI.Prequest.Startall
        self._buffers = [*outgoing, *incoming]
        self._sends = [
            comm.comm.Send_init(data, message.peer, comm.first_tag + message.tag)
            for message, data in zip(sends, outgoing, strict=True)
        ]
        self._recvs = [
            comm.comm.Recv_init(data, message.peer, comm.first_tag + message.tag)
            for message, data in zip(recvs, incoming, strict=True)
        ]
        self._requests = [*self._recvs, *self._sends]
        self._is_receiving = False
        # Tests before the first poll of the other ranks' status, which takes longer than a message.
        self._spins = 16 * comm.context.spins_per_yield
        # One by one: most messages need several tests, and Testall takes three times as long.
        self._tests = [request.Test for request in self._requests]
        self._testall = MPI.Request.Testall
        self._peers = [message.peer for message in (*recvs, *sends)]

    def receive(self) -> None:
        """Start the receives, if possible before the senders send.

        An exchange that was interrupted before it sent has started them already.
        """
        if self._is_receiving:
            return
        self._startall(self._recvs)
        self._is_receiving = True

    def send(self) -> None:
        """Start the sends of the packed messages, and the receives if they are not yet started."""
        self._startall(self._sends if self._is_receiving else self._requests)
        self._is_receiving = False

    def exchange(self) -> None:
        self.send()
        self.wait()

    def wait(self) -> None:
        """Wait on the host until all messages are sent and received, with the deadline.

        After an interrupt this rank leaves the node: messages under way cannot be taken back.
        """
        try:
            spins = self._spins
            for test in self._tests:
                while not test():
                    spins -= 1
                    if spins < 0:
                        self._poll()  # for all of them
                        break
        except BaseException as error:
            self._comm.context.life.leave(self._call, error)  # of a handler of a signal
            raise

    def _poll(self) -> None:
        self._comm.wait_anywhere(self._call, self._pending, partial(self._testall, self._requests))

    def close(self) -> None:
        """Free the requests: none is under way, as a plan whose call has failed is not closed."""
        for request in self._requests:
            request.Free()
        self._requests, self._sends, self._recvs, self._buffers = [], [], [], []
        self._tests = []

    def _pending(self) -> list[int]:
        pairs = zip(self._peers, self._requests, strict=True)
        return sorted({rank for rank, request in pairs if not request.Test()})

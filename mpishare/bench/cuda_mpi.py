"""CUDA-aware MPI: persistent requests with pointers to memory of the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from mpi4py import MPI

from mpishare.bench.library import Library, Transfer
from mpishare.bench.session import Call, Session
from mpishare.bench.staged import memory_of
from mpishare.runtime.route import why_no_gpu_messages


class CudaMpi(Library):
    """The MPI of the run, where it takes pointers to memory of the GPU."""

    label = "CUDA-aware MPI"
    halves = 2
    is_direct = True

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._requests: list[MPI.Prequest] = []

    @classmethod
    def require(cls, session: Session) -> None:  # noqa: ARG003
        if failure := why_no_gpu_messages():
            raise cls.refusal(f"not CUDA-aware: {failure}")

    def bind(self, transfers: Sequence[Transfer], *, early: bool) -> Call:
        comm, synchronize = self.session.comm, self.session.synchronize
        startall, waitall = MPI.Prequest.Startall, MPI.Request.Waitall
        synchronize()  # what `empty` wrote is there before any message
        numbered = list(enumerate(transfers))
        receives = [comm.Recv_init(memory_of(one.into), one.source, tag) for tag, one in numbered]
        sends = [comm.Send_init(memory_of(one.out), one.to, tag) for tag, one in numbered]
        requests = [*receives, *sends]
        self._requests += requests

        def move() -> None:
            if early:
                startall(receives)
                synchronize()
                startall(sends)
            else:
                synchronize()
                startall(requests)
            waitall(requests)

        return move

    def bind_sum(self, array: Any) -> Call:
        kind = MPI.DOUBLE_COMPLEX if array.dtype.kind == "c" else MPI.DOUBLE
        call = partial(self.session.comm.Allreduce, MPI.IN_PLACE, [memory_of(array), kind])
        return self.session.synchronized(call)

    def bind_gather(self, out: Any, into: Any) -> Call:
        ends = [[memory_of(array), MPI.BYTE] for array in (out, into)]
        return self.session.synchronized(partial(self.session.comm.Allgather, *ends))

    def close(self) -> None:
        for request in self._requests:
            request.Free()

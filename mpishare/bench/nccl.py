"""NCCL: grouped sends and receives, as kernels on the stream."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from cupy.cuda import nccl
from mpi4py import MPI

from mpishare.bench.library import Library, Transfer
from mpishare.bench.session import Call, Session, in_turn

_NUMBER = nccl.get_version() if nccl.available else 0
__version__ = f"{_NUMBER // 10000}.{_NUMBER % 10000 // 100}.{_NUMBER % 100}" if _NUMBER else None


def set_environment() -> None:
    """Set what NCCL reads when it makes its first communicator. Local."""
    # Sends, receives and puts do not use multicast, and its setup affects every GPU of the host,
    # including those of other users.
    os.environ["NCCL_NVLS_ENABLE"] = "0"


class NcclCalls(Library):
    """One communicator of NCCL over all ranks of the run, by the calls of any binding."""

    group: tuple[Call, Call]  # begins and ends one
    #: Send, receive, all-reduce and all-gather; all end in `rest`.
    calls: tuple[Callable[..., object], ...]
    kinds: tuple[int, int, int]  # words, numbers, and the operation that adds these
    rest: tuple[int, ...]

    def bind(self, transfers: Sequence[Transfer], *, early: bool) -> Call:  # noqa: ARG002
        return self.one_group(transfers, self.kinds[0], *self.rest)

    def one_group(self, transfers: Sequence[Transfer], kind: int, *rest: int) -> Call:
        """Return the call of one group of all sends and receives of a type. Local."""
        begin, end = self.group
        send, recv, *_ = self.calls
        # Between two ranks NCCL matches the messages in order.
        sent = [(send, each.out, each.to) for each in transfers]
        received = [(recv, each.into, each.source) for each in transfers]
        moves = [
            partial(call, int(memory.data.ptr), int(memory.size), kind, rank, *rest)
            for call, memory, rank in (*sent, *received)
            if rank != MPI.PROC_NULL
        ]
        return in_turn(begin, *moves, end)

    def bind_sum(self, array: Any) -> Call:
        numbers, (_, kind, add) = array.view("f8"), self.kinds
        address, count = int(numbers.data.ptr), int(numbers.size)
        return partial(self.calls[2], address, address, count, kind, add, *self.rest)

    def bind_gather(self, out: Any, into: Any) -> Call:
        addresses = int(out.data.ptr), int(into.data.ptr)
        return partial(self.calls[3], *addresses, int(out.size), self.kinds[0], *self.rest)


class Nccl(NcclCalls):
    """The NCCL that CuPy brings."""

    label = "NCCL"
    is_direct = True
    #: Only where each rank names a host of its own: to NCCL they are then on several machines.
    shares_gpus = "NCCL_HOSTID" in os.environ

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        comm = session.comm
        name = comm.bcast(nccl.get_unique_id() if comm.rank == 0 else None, 0)
        with self.refusals(nccl.NcclError):
            made = self._comm = nccl.NcclCommunicator(comm.size, name, comm.rank)
        self.group = nccl.groupStart, nccl.groupEnd
        self.calls = made.send, made.recv, made.allReduce, made.allGather
        self.kinds = nccl.NCCL_UINT64, nccl.NCCL_FLOAT64, nccl.NCCL_SUM
        self.rest = (int(session.stream.ptr),)

    @classmethod
    def require(cls, session: Session) -> None:  # noqa: ARG003
        set_environment()
        if not nccl.available:
            raise cls.refusal("not installed, or not where CuPy looks for it")

    def close(self) -> None:
        self.session.synchronize()
        self._comm.destroy()

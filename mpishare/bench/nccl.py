"""NCCL: grouped sends and receives, as kernels on the stream."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from cupy.cuda import nccl
from mpi4py import MPI

from mpishare.bench.library import Library, Transfer, refusals
from mpishare.bench.session import Call, Session
from mpishare.errors import UnsupportedError

_NUMBER = nccl.get_version() if nccl.available else 0
__version__ = f"{_NUMBER // 10000}.{_NUMBER % 10000 // 100}.{_NUMBER % 100}" if _NUMBER else None


def set_environment(session: Session) -> None:
    """Set what NCCL reads when it makes its first communicator. Local."""
    # Sends, receives and puts do not use multicast, and its setup affects every GPU of the host,
    # including those of other users.
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    if session.ranks_per_gpu > 1:
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")  # since 2.30


def one_group(
    transfers: Sequence[Transfer],
    group: tuple[Callable[[], object], Callable[[], object]],
    calls: tuple[Callable[..., object], Callable[..., object]],
    kind: int,
    *rest: int,
) -> Call:
    """Return the call of one group of all sends and receives, by any binding of NCCL. Local.

    `group` begins and ends one, `calls` send and receive: words of the type `kind`, with `rest` as
    their last arguments.
    """
    begin, end = group
    send, recv = calls
    # Between two ranks NCCL matches the messages in order.
    sent = [(send, each.out, each.to) for each in transfers]
    received = [(recv, each.into, each.source) for each in transfers]
    moves = [
        partial(call, int(memory.data.ptr), int(memory.size), kind, rank, *rest)
        for call, memory, rank in (*sent, *received)
        if rank != MPI.PROC_NULL
    ]

    def move() -> None:
        begin()
        for each in moves:
            each()
        end()

    return move


class Nccl(Library):
    """One communicator over all ranks of the run."""

    label = "NCCL"
    is_direct = True
    shared_trial = "nccl"

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        comm = session.comm
        name = comm.bcast(nccl.get_unique_id() if comm.rank == 0 else None, 0)
        with refusals(self.label, nccl.NcclError):
            self._comm = nccl.NcclCommunicator(comm.size, name, comm.rank)

    @property
    def communicator(self) -> nccl.NcclCommunicator:
        return self._comm

    @classmethod
    def require(cls, session: Session) -> None:
        set_environment(session)
        if not nccl.available:
            raise UnsupportedError("NCCL: not installed, or not where CuPy looks for it")

    @classmethod
    def unique_id(cls) -> bytes:
        name = nccl.get_unique_id()  # bytes; until CuPy 13 a tuple of numbers
        return name if isinstance(name, bytes) else np.array(name, "i1").tobytes()

    def bind(self, transfers: Sequence[Transfer], *, early: bool) -> Call:  # noqa: ARG002
        stream, comm = int(self.session.stream.ptr), self._comm
        group = nccl.groupStart, nccl.groupEnd
        return one_group(transfers, group, (comm.send, comm.recv), nccl.NCCL_UINT64, stream)

    def bind_sum(self, array: Any) -> Call:
        numbers = array.view("f8")
        address, stream = int(numbers.data.ptr), int(self.session.stream.ptr)
        return partial(
            self._comm.allReduce,
            address,
            address,
            int(numbers.size),
            nccl.NCCL_FLOAT64,
            nccl.NCCL_SUM,
            stream,
        )

    def bind_gather(self, out: Any, into: Any) -> Call:
        addresses = int(out.data.ptr), int(into.data.ptr)
        stream = int(self.session.stream.ptr)
        return partial(self._comm.allGather, *addresses, int(out.size), nccl.NCCL_UINT64, stream)

    def close(self) -> None:
        self.session.synchronize()
        self._comm.destroy()

"""NCCL: grouped sends and receives, as kernels on the stream."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import cupy
from cupy.cuda import nccl

from mpishare.bench.links.link import Library, refusals
from mpishare.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.bench.links.link import Link
    from mpishare.bench.session import Session


class Nccl(Library):
    """One communicator over all ranks of the run."""

    label = "NCCL"
    is_direct = True

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        # Sends and receives gain nothing from multicast, and setting it up concerns every GPU of
        # the host, also those of others.
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        comm = session.comm
        name = comm.bcast(nccl.get_unique_id() if comm.rank == 0 else None, 0)
        with refusals(self.label, nccl.NcclError):
            self._comm = nccl.NcclCommunicator(comm.size, name, comm.rank)

    @classmethod
    def require(cls, session: Session) -> None:  # noqa: ARG003 - it needs no more than the library
        """Refuse to be made where CuPy finds no NCCL. Local."""
        if not nccl.available:
            raise UnsupportedError("NCCL: not installed, or not where CuPy looks for it")

    def empty(self, words: int) -> Any:
        """Return memory of the GPU. Local."""
        return cupy.zeros(words, "u8")

    def mover(self, links: Sequence[Link], *, early: bool) -> Callable[[], None]:  # noqa: ARG002
        """Return one group of all sends and receives. Stream-ordered."""
        stream = int(self.session.stream.ptr)
        kind = nccl.NCCL_UINT64
        send, recv = self._comm.send, self._comm.recv
        start, end = nccl.groupStart, nccl.groupEnd
        # Between two ranks NCCL matches the messages in the order in which they are listed.
        out = [(int(each.out.data.ptr), each.words, kind, each.to, stream) for each in links]
        into = [(int(each.into.data.ptr), each.words, kind, each.source, stream) for each in links]

        def move() -> None:
            start()
            for words in out:
                send(*words)
            for words in into:
                recv(*words)
            end()

        return move

    def close(self) -> None:
        """End the communicator. Collective."""
        self.session.synchronize()
        self._comm.destroy()


def version() -> str | None:
    """Return the version of NCCL, None where there is none. Local."""
    if not nccl.available:
        return None
    number = nccl.get_version()
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"

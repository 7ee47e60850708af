"""Redistributions as they are written without mpishare: by `Alltoallv`, `Alltoallw` and NCCL.

All have `forward` and `backward` of a `mpishare.Redistribute` that turns a complex field of four
axes, cut along axis 1, into one that is cut along axis 2, in any order of its axes in memory.
No part may be empty.
"""

from __future__ import annotations

import os
from math import prod
from typing import TYPE_CHECKING, Any

import common
import numpy as np
from mpi4py import MPI

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare import Node

    Array = Any  # numpy.ndarray or cupy.ndarray
    Box = tuple[slice, ...]


def planes(cells: int, ranks: int, axis: int) -> list[Box]:
    """Return what each rank has of four axes where this one is cut."""
    whole = (slice(None),) * 4
    parts = np.array_split(np.arange(cells), ranks)
    return [
        (*whole[:axis], slice(int(part[0]), int(part[-1]) + 1), *whole[axis + 1 :])
        for part in parts
    ]


class Side:
    """The messages of one side: one piece of memory, on CUDA with a twin in pinned memory."""

    def __init__(self, xp: Any, shape: Sequence[int], boxes: Sequence[Box]) -> None:
        self.shape, self.boxes = tuple(shape), boxes
        cells = np.broadcast_to(0, self.shape)  # of no memory: for the shapes of the boxes
        shapes = [cells[box].shape for box in boxes]
        self.counts = [prod(each) for each in shapes]
        self.all = self.on_host = xp.empty(sum(self.counts), complex)
        if xp is not np:
            import cupyx

            self.on_host = cupyx.empty_pinned(self.all.shape, complex)
        parts = xp.split(self.all, np.cumsum(self.counts)[:-1].tolist())
        self.messages = [part.reshape(each) for part, each in zip(parts, shapes, strict=True)]


class Alltoallv:
    """Packed, sent by one `Alltoallv`, on CUDA from the host and to it, and unpacked."""

    def __init__(
        self, comm: MPI.Intracomm, shape: Sequence[int], permute: Sequence[int] | None, node: Node
    ) -> None:
        self.comm, self.xp = comm, node.xp
        self.order = tuple(permute or range(4))
        self.restored = tuple(int(axis) for axis in np.argsort(self.order))
        rows, columns = planes(shape[1], comm.size, 1), planes(shape[2], comm.size, 2)
        cells = np.broadcast_to(0, tuple(shape))
        self.source = Side(self.xp, cells[rows[comm.rank]].shape, columns)
        self.target = Side(self.xp, cells[columns[comm.rank]].shape, rows)
        self.source_shape = self.source.shape
        self.target_shape = tuple(self.target.shape[axis] for axis in self.order)

    def forward(self, a: Array) -> Array:
        """Return this rank's part of the target."""
        b = self.xp.empty(self.target_shape, complex)
        self.move(self.source, a, self.target, b.transpose(self.restored))
        return b

    def backward(self, b: Array) -> Array:
        """Return this rank's part of the source."""
        a = self.xp.empty(self.source_shape, complex)
        self.move(self.target, b.transpose(self.restored), self.source, a)
        return a

    def move(self, out: Side, given: Array, into: Side, wanted: Array) -> None:
        """Send the cells of one array to where they belong in the other one."""
        for message, box in zip(out.messages, out.boxes, strict=True):
            message[...] = given[box]
        self.send(out, into)
        for message, box in zip(into.messages, into.boxes, strict=True):
            wanted[box] = message

    def send(self, out: Side, into: Side) -> None:
        """Send all messages, and receive as many."""
        if self.xp is not np:
            out.all.get(out=out.on_host)
        self.comm.Alltoallv([out.on_host, out.counts], [into.on_host, into.counts])
        if self.xp is not np:
            into.all.set(into.on_host, stream=self.xp.cuda.get_current_stream())

    def close(self) -> None:
        """Free what was made."""


class Nccl(Alltoallv):
    """Packed, sent by one group of NCCL's sends and receives, and unpacked."""

    def __init__(
        self, comm: MPI.Intracomm, shape: Sequence[int], permute: Sequence[int] | None, node: Node
    ) -> None:
        from cupy.cuda import nccl

        super().__init__(comm, shape, permute, node)
        # Sends use no multicast, whose setup affects every GPU of the host.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        self.nccl = nccl
        name = comm.bcast(nccl.get_unique_id() if comm.rank == 0 else None)
        self.ranks = nccl.NcclCommunicator(comm.size, name, comm.rank)

    def send(self, out: Side, into: Side) -> None:
        """Send all messages, and receive as many, on the stream."""
        numbers, stream = self.nccl.NCCL_FLOAT64, self.xp.cuda.get_current_stream().ptr
        self.nccl.groupStart()
        for rank, (sent, got) in enumerate(zip(out.messages, into.messages, strict=True)):
            self.ranks.send(sent.data.ptr, 2 * sent.size, numbers, rank, stream)
            self.ranks.recv(got.data.ptr, 2 * got.size, numbers, rank, stream)
        self.nccl.groupEnd()

    def close(self) -> None:
        """Destroy the communicator. Collective."""
        self.ranks.destroy()


class Alltoallw(Alltoallv):
    """One `Alltoallw` of subarrays, which MPI packs; on CUDA whole arrays go through the host."""

    def __init__(
        self, comm: MPI.Intracomm, shape: Sequence[int], permute: Sequence[int] | None, node: Node
    ) -> None:
        super().__init__(comm, shape, permute, node)
        self.types = {side: subarrays(side) for side in (self.source, self.target)}

    def move(self, out: Side, given: Array, into: Side, wanted: Array) -> None:
        """Send the cells of one array to where they belong in the other one."""
        sent = self.xp.ascontiguousarray(given)
        sent = sent if self.xp is np else sent.get()
        got = np.empty(into.shape, complex)
        self.comm.Alltoallw([sent, self.types[out]], [got, self.types[into]])
        wanted[...] = self.xp.asarray(got)

    def close(self) -> None:
        """Free the datatypes."""
        for each in (*self.types[self.source], *self.types[self.target]):
            each.Free()


def subarrays(side: Side) -> list[MPI.Datatype]:
    """Return the boxes of a side as datatypes."""
    made = []
    for box, message in zip(side.boxes, side.messages, strict=True):
        corner = [cells.start or 0 for cells in box]
        made.append(MPI.C_DOUBLE_COMPLEX.Create_subarray(side.shape, message.shape, corner))
        made[-1].Commit()
    return made


FORMS = {"alltoallv": Alltoallv, "alltoallw": Alltoallw, "nccl": Nccl}
STAGED = ("alltoallv", "alltoallw")


def forms(node: Node) -> tuple[str, ...]:
    """Return the names of those that run here: NCCL where CuPy has it, on a GPU per rank."""
    if node.backend == "cuda" and common.has_gpu_each(node):
        from cupy.cuda import nccl

        if nccl.available:
            return *STAGED, "nccl"
    return STAGED


class Still:
    """Moves cells at its first calls, and later none: for the time of all else in a step."""

    def __init__(self, plan: Any) -> None:
        self.plan = plan
        self.target: Array = None
        self.source: Array = None

    def forward(self, a: Array) -> Array:
        """Return what the first call returned."""
        if self.target is None:
            self.target = self.plan.forward(a)
        return self.target

    def backward(self, b: Array) -> Array:
        """Return what the first call returned."""
        if self.source is None:
            self.source = self.plan.backward(b)
        return self.source

    def close(self) -> None:
        """Let go of the arrays."""
        self.target = self.source = None

"""The ranks that reduce on one node, and the data that their launches share."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpishare.backends import driver
from mpishare.plans.gpu.graphs import GraphCache
from mpishare.plans.gpu.launch import PlanLauncher, kernel
from mpishare.plans.gpu.staging import PlanBuffers
from mpishare.reduction.cuda.records import address_array, options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.backends.driver import Enqueued
    from mpishare.plans.comm import PlanComm
    from mpishare.plans.engine import PlanSetup
    from mpishare.plans.gpu.replay import FastCall
    from mpishare.plans.layout import FieldLayout
    from mpishare.reduction.cuda.records import Form, Shape
    from mpishare.reduction.operation import Operation

Epoch = tuple[int, int, int]
"""Arguments of a kernel that begins or ends an epoch: offset to its odd buffers, and addresses."""

NO_EPOCH: Epoch = 0, 0, 0
_THREADS, _ELEMENTS_PER_THREAD = 512, 2
_FILES = {"pack": "streamed.cu", "fold": "streamed.cu"}  # others: as the kernel


class Group(PlanLauncher):
    """The ranks of a plan on this node, and their launches."""

    def __init__(self, setup: PlanSetup, operation: Operation) -> None:
        comm = setup.comm
        super().__init__(setup.context, f"{setup.name}, rank {comm.rank} of {comm.size}")
        self.backend, self.operation = setup.context.backend, operation
        self.ranks = list(comm.ranks_here)
        self.me, self.size = self.ranks.index(comm.rank), len(self.ranks)

    @property
    def itemsize(self) -> int:
        return self.operation.dtype.itemsize

    def launch(
        self,
        name: str,
        size: tuple[int, int],
        arguments: Sequence[Any],
        *,
        form: Form,
        nranks: int = 0,
    ) -> driver.Launch:
        """Prepare a launch of (blocks, threads); `arguments` are held, and read at each launch."""
        path = Path(__file__).with_name(_FILES.get(name, f"{name}.cu"))
        given = options(self.operation, nranks or self.size, form)
        function = kernel(path, name, given, self.device)
        return driver.Launch(function, *size, arguments, self.where)

    def pack(
        self,
        shape: Shape,
        field: Any,
        begin: int,
        count: int,
        row: int,
        epoch: Epoch,
        *,
        form: Form,
    ) -> driver.Launch:
        """Prepare the launch that copies elements of a field to a row, and may begin an epoch."""
        arguments = [shape, field, begin, count, row, *epoch]
        return self.launch("pack", self.grid_of(count), arguments, form=form)

    def fold(
        self,
        shape: Shape,
        rows: Sequence[int],
        field: Any,
        begin: int,
        count: int,
        epoch: Epoch,
        *,
        form: Form,
    ) -> driver.Launch:
        """Prepare the launch that folds rows into a field in their order, and may end an epoch."""
        arguments = [shape, address_array(rows), field, begin, count, *epoch]
        return self.launch("fold", self.grid_of(count), arguments, form=form, nranks=len(rows))

    def grid_of(self, count: int) -> tuple[int, int]:
        """Return the blocks and threads for so many elements, in a kernel that does not wait."""
        wanted = -(-count // (_THREADS * _ELEMENTS_PER_THREAD))
        return max(1, min(wanted, self.most_blocks)), _THREADS


class Buffers(PlanBuffers):
    """A buffer per rank, of the same size, mapped by all.

    `in_host_memory`: pinned memory instead of each rank's GPU. `are_streamed`: streams wait for
    other ranks, not kernels.
    """

    def __init__(
        self, comm: PlanComm, name: str, nbytes: int, *, in_host_memory: bool, are_streamed: bool
    ) -> None:
        self._ranks = list(comm.ranks_here)
        self._row = nbytes if in_host_memory else 0
        others = [rank for rank in self._ranks if rank != comm.rank]
        of_gpu = dict.fromkeys(self._ranks, 0 if in_host_memory else nbytes)
        pinned_nbytes = self._row * len(self._ranks)
        super().__init__(comm, name, of_gpu, others, pinned_nbytes, others if are_streamed else [])

    def addresses(self, offset: int = 0) -> list[int]:
        """Return the address of each rank's buffer as mapped here, plus `offset` bytes."""
        if self._row:
            base = self.flags.staging_address
            return [base + place * self._row + offset for place in range(len(self._ranks))]
        return [self.address_of(rank) + offset for rank in self._ranks]


class InOrder:
    """Several launches or signals of one call, enqueued in order."""

    def __init__(self, parts: Sequence[Enqueued]) -> None:
        self._parts = parts

    def enqueue(self, stream: int) -> None:
        for part in self._parts:
            part.enqueue(stream)


class Pointers:
    """The addresses of a call's arrays, read by its launches when they are enqueued.

    `arguments` are the same memory as arguments of a launch.
    """

    def __init__(self, count: int) -> None:
        self.array = (ctypes.c_uint64 * count)()
        self.arguments = [ctypes.c_uint64.from_buffer(self.array, 8 * at) for at in range(count)]


class PreparedCall(GraphCache):
    """The work that a call enqueues for arrays of these layouts."""

    def __init__(
        self,
        layouts: Sequence[FieldLayout],
        enqueued: Enqueued,
        pointers: Pointers,
        capturing: int,
        where: str,
    ) -> None:
        super().__init__(pointers.array, where, enqueued, capturing, {})
        self.layouts = layouts
        self.try_fast: FastCall = _never


def _never(fields: Sequence[Any], stream: Any) -> bool:  # noqa: ARG001
    return False

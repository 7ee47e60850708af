"""The ranks that reduce on one node, and the data that their launches share."""

from __future__ import annotations

import ctypes
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpishare.backends import driver
from mpishare.plans.gpu.graphs import GraphCache
from mpishare.plans.gpu.launch import PlanLauncher, kernel
from mpishare.plans.gpu.replay import never
from mpishare.plans.gpu.staging import PlanBuffers
from mpishare.plans.message import padded
from mpishare.reduction.cuda.records import address_array, options, shapes_of
from mpishare.reduction.exact import SUM_OF_WORDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.backends.driver import Enqueued
    from mpishare.plans.comm import PlanComm
    from mpishare.plans.engine import PlanSetup
    from mpishare.plans.gpu.replay import FastCall
    from mpishare.plans.layout import FieldLayout
    from mpishare.reduction.cuda.records import Form, Shape
    from mpishare.reduction.exact import ExactOperation
    from mpishare.reduction.operation import Operation

Epoch = tuple[int, int]
"""Arguments of a kernel that begins or ends an epoch: its `Epochs`, and a word for the host."""

NO_EPOCH: Epoch = 0, 0
_THREADS, _ELEMENTS_PER_THREAD = 512, 2
_ROUNDING_THREADS = 128
_FILES = {"pack": "nodes.cu", "fold": "nodes.cu", "exact_round": "exact_dot.cu"}
_EXACT = "exact_dot", "exact_round"
_ALIGN = 128


class Group(PlanLauncher):
    """Those `ranks` of a plan on this node that kernels combine, and their launches.

    `sums` are what is combined of dot products: elements, or the words of exact ones.
    """

    def __init__(
        self,
        setup: PlanSetup,
        ranks: list[int],
        operation: Operation,
        exact: ExactOperation | None,
    ) -> None:
        comm = setup.comm
        super().__init__(setup.context, f"{setup.name}, rank {comm.rank} of {comm.size}")
        self.backend, self.operation = setup.context.backend, operation
        self.ranks = ranks
        self.me, self.size = ranks.index(comm.rank), len(ranks)
        self.exact, self.sums, self.sum_count, self.dot_name = exact, self, 1, "dot"
        if exact is not None:
            self.sums, self.sum_count, self.dot_name = copy(self), exact.nwords, "exact_dot"
            self.sums.operation = SUM_OF_WORDS

    @property
    def itemsize(self) -> int:
        return self.operation.dtype.itemsize

    @property
    def sum_nbytes(self) -> int:
        """Bytes of what is combined of a dot product."""
        return self.sum_count * self.sums.itemsize

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
        # Elements of two ranks are added as they are, their dot products exactly.
        operation = self.exact if self.exact and name in _EXACT else self.operation
        given = options(operation, nranks or self.size, form)
        function = kernel(path, name, given, self.device)
        return driver.Launch(function, *size, arguments, self.where)

    def pack(
        self, shape: Shape, field: Any, count: int, row: int, epoch: Epoch, *, form: Form
    ) -> driver.Launch:
        """Prepare the launch that copies elements of a field to a row, and may begin an epoch."""
        arguments = [shape, field, count, row, *epoch]
        return self.launch("pack", self.grid_of(count), arguments, form=form)

    def fold(
        self, shape: Shape, rows: Sequence[int], field: Any, count: int, epoch: Epoch, *, form: Form
    ) -> driver.Launch:
        """Prepare the launch that folds rows into a field in their order, and may end an epoch."""
        arguments = [shape, address_array(rows), field, count, *epoch]
        return self.launch("fold", self.grid_of(count), arguments, form=form, nranks=len(rows))

    @property
    def blocks_nbytes(self) -> int:
        """Bytes of what the blocks of a dot product leave for the last one."""
        return 16 * self.most_blocks if self.exact is None else self.sum_nbytes

    def shape_of_sum(self) -> Shape:
        """Return the record of what is combined of a dot product, as a row."""
        step = self.sums.itemsize
        (shape,), _ = shapes_of((self.sum_count,), [(step,)], step, "C")
        return shape

    def round(self, words: int, out: Any) -> list[driver.Launch]:
        """Prepare what rounds the sum of all ranks, where it is in words."""
        if self.exact is None:
            return []
        size = 1, _ROUNDING_THREADS
        return [self.launch("exact_round", size, [words, out], form="ROW")]

    def grid_of(self, count: int) -> tuple[int, int]:
        """Return the blocks and threads for so many elements, in a kernel that does not wait."""
        wanted = -(-count // (_THREADS * _ELEMENTS_PER_THREAD))
        return max(1, min(wanted, self.most_blocks)), _THREADS


class Buffers(PlanBuffers):
    """A buffer per rank, of the same size, mapped by all.

    `in_host_memory`: pinned memory instead of each rank's GPU.
    """

    def __init__(
        self, comm: PlanComm, name: str, ranks: list[int], nbytes: int, *, in_host_memory: bool
    ) -> None:
        self._ranks = ranks
        self._row = padded(nbytes, _ALIGN) if in_host_memory else 0
        others = [rank for rank in ranks if rank != comm.rank]
        of_gpu = dict.fromkeys(ranks, 0 if in_host_memory else nbytes)
        super().__init__(comm, name, of_gpu, others, self._row * len(ranks), [])

    def addresses(self, offset: int = 0) -> list[int]:
        """Return the address of each rank's buffer as mapped here, plus `offset` bytes."""
        if self._row:
            base = self.flags.staging_address
            return [base + place * self._row + offset for place in range(len(self._ranks))]
        return [self.address_of(rank) + offset for rank in self._ranks]


class Pointers:
    """The addresses of a call's arrays, read by its launches when they are enqueued.

    `arguments` are the same memory as arguments of a launch.
    """

    def __init__(self, count: int) -> None:
        self.array = (ctypes.c_uint64 * count)()
        self.arguments = [ctypes.c_uint64.from_buffer(self.array, 8 * at) for at in range(count)]


class PreparedCall(GraphCache):
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
        self.try_fast: FastCall = never

"""The ranks that reduce on one node, and the data that their launches share."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from mpishare.backends import driver
from mpishare.plans.gpu.graphs import GraphCache
from mpishare.plans.gpu.tables import Tables
from mpishare.reduction.cuda.kernels import kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.backends.driver import Enqueued
    from mpishare.plans.engine import PlanSetup
    from mpishare.plans.gpu.replay import FastCall
    from mpishare.plans.layout import FieldLayout
    from mpishare.reduction.cuda.records import Form
    from mpishare.reduction.operation import Operation

_SM_COUNT = 16  # cudaDevAttrMultiProcessorCount
_BLOCKS_PER_SM = 2


class Group:
    """The ranks of a plan on this node, and the data that their launches share."""

    def __init__(self, setup: PlanSetup, operation: Operation) -> None:
        comm, context = setup.comm, setup.context
        backend: Any = context.backend
        self.context, self.backend, self.operation = context, backend, operation
        self.ranks = list(comm.ranks_here)
        self.me, self.size = self.ranks.index(comm.rank), len(self.ranks)
        self.where = f"{setup.name}, rank {comm.rank} of {comm.size}"
        self.device: int = backend.device.ordinal
        self.sm_count = sm_count = int(cupy.cuda.runtime.deviceGetAttribute(_SM_COUNT, self.device))
        sharing = context.all_uuids.count(context.uuids[context.rank])
        self.blocks = _BLOCKS_PER_SM * sm_count
        # Under MPS, waiting blocks must leave room for those that they wait for.
        self.resident_blocks = self.blocks if sharing == 1 else max(1, sm_count // sharing)
        # Not of CuPy's pool: its free memory may still be read by earlier work on its stream, and
        # launches on other streams do not wait for that.
        self._tables = Tables(context)

    @property
    def itemsize(self) -> int:
        return self.operation.dtype.itemsize

    def zeros(self, nbytes: int) -> int:
        """Return the address of zeroed GPU memory after `load`; held until `close`."""
        return self.upload(np.zeros(max(nbytes, 1), np.uint8))

    def upload(self, array: np.ndarray[Any, Any]) -> int:
        """Return the address that an array has on the GPU after `load`; held until `close`."""
        return self._tables.add(array)

    def load(self, stream: int) -> None:
        """Enqueue the copies of the launches' data, once, before the first launch."""
        self._tables.upload(stream)

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
        nranks = nranks or self.size
        function = kernel(name, self.operation, nranks, self.device, form)
        return driver.Launch(function, *size, arguments, self.where)

    def close(self) -> None:
        """Free the launches' data, once none is under way."""
        self._tables.close()


class InOrder:
    """Several launches or signals of one call, enqueued in order."""

    def __init__(self, parts: Sequence[Enqueued]) -> None:
        self._parts = parts

    def enqueue(self, stream: int) -> None:
        for part in self._parts:
            part.enqueue(stream)


class Pointers:
    """The addresses of a call's arrays, read by its launches when they are enqueued."""

    def __init__(self, count: int) -> None:
        self.array = (ctypes.c_uint64 * count)()

    def argument(self, index: int) -> Any:
        """Return one of them as the argument of a launch."""
        return ctypes.c_uint64.from_buffer(self.array, 8 * index)


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

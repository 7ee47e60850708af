"""The ranks that reduce on one node, and the data that their launches share."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpishare.backends import driver, kernels
from mpishare.plans.gpu.graphs import GraphCache
from mpishare.plans.gpu.launch import PlanLauncher
from mpishare.plans.gpu.sources import source
from mpishare.reduction.cuda.records import options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.backends.driver import Enqueued
    from mpishare.plans.engine import PlanSetup
    from mpishare.plans.gpu.replay import FastCall
    from mpishare.plans.layout import FieldLayout
    from mpishare.reduction.cuda.records import Form
    from mpishare.reduction.operation import Operation

_FILES = {"pack": "streamed.cu", "fold": "streamed.cu"}  # others: as the kernel


@functools.cache
def kernel(name: str, operation: Operation, nranks: int, device: int, form: Form) -> int:
    """Return the driver's handle of a kernel, loaded on the current device, to which it belongs."""
    del device
    code = source(Path(__file__).with_name(_FILES.get(name, f"{name}.cu")))
    return kernels.kernel(code, name, options(operation, nranks, form))


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
        nranks = nranks or self.size
        function = kernel(name, self.operation, nranks, self.device, form)
        return driver.Launch(function, *size, arguments, self.where)


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

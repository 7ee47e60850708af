"""The ranks that reduce on one node, as their launches need them."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Protocol

import cupy
import numpy as np

from mpishare.backends import driver
from mpishare.halo.cuda.tables import Tables
from mpishare.reduction.cuda.kernels import kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.halo.engine import PlanSetup
    from mpishare.reduction.cuda.records import Form
    from mpishare.reduction.operation import Operation

_SM_COUNT = 16  # cudaDevAttrMultiProcessorCount
_BLOCKS_PER_SM = 2


class Enqueued(Protocol):
    """What a call puts on its stream."""

    def enqueue(self, stream: int) -> None:
        """Enqueue it."""
        ...


class Group:
    """The ranks of a plan on this node, and what their launches have in common. Local.

    Parameters
    ----------
    setup : PlanSetup
        The plan's.
    operation : Operation
        How two elements become one.

    Attributes
    ----------
    me, size : int
        The place of this rank among them, and how many they are.
    sm_count, blocks : int
        Multiprocessors of the GPU, and how many blocks fill it.
    resident_blocks : int
        How many blocks of each rank fit on the GPU at once, beside those of the ranks that share
        it.
    where : str
        Names the plan and the rank in errors.
    """

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
        # Under MPS, the blocks that wait must leave room for those that they wait for.
        self.resident_blocks = self.blocks if sharing == 1 else max(1, sm_count // sharing)
        # Not of CuPy's pool: what is free there may still be read by work that its stream was given
        # earlier, and launches on other streams do not wait for that.
        self._tables = Tables(context)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.operation.dtype.itemsize

    def zeros(self, nbytes: int) -> int:
        """Return where zeroed GPU memory will be after `load`; held until `close`."""
        return self.upload(np.zeros(max(nbytes, 1), np.uint8))

    def upload(self, array: np.ndarray[Any, Any]) -> int:
        """Return where an array will be on the GPU after `load`; held until `close`."""
        return self._tables.add(array)

    def load(self, stream: int) -> None:
        """Enqueue the copies of what launches read, once, before the first launch."""
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
        """Prepare a launch of a kernel.

        Parameters
        ----------
        name : str
            See `kernel`.
        size : tuple of int
            Blocks, and threads in each.
        arguments : sequence of ctypes objects
            Held, and read at each launch.
        form : str
            How elements lie.
        nranks : int, optional
            How many ranks reduce. Default: all.
        """
        nranks = nranks or self.size
        function = kernel(name, self.operation, nranks, self.device, form)
        return driver.Launch(function, *size, arguments, self.where)

    def close(self) -> None:
        """Free what the launches read, once none is under way."""
        self._tables.close()


class InOrder:
    """Several things that one call enqueues, one after the other."""

    def __init__(self, parts: Sequence[Enqueued]) -> None:
        self._parts = parts

    def enqueue(self, stream: int) -> None:
        """Enqueue them on a stream."""
        for part in self._parts:
            part.enqueue(stream)


class Pointers:
    """The addresses of a call's arrays, which its launches read from here when they are enqueued.

    Attributes
    ----------
    array : ctypes array
        The addresses.
    """

    def __init__(self, count: int) -> None:
        self.array = (ctypes.c_uint64 * count)()

    def argument(self, index: int) -> Any:
        """Return one of them as the argument of a launch."""
        return ctypes.c_uint64.from_buffer(self.array, 8 * index)

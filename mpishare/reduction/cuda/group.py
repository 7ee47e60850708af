"""The ranks that reduce on one node, as their launches need them."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Protocol

import cupy

from mpishare.backends import driver
from mpishare.reduction.cuda.kernels import kernel
from mpishare.reduction.cuda.records import shapes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.halo.engine import PlanSetup
    from mpishare.reduction.cuda.records import Shape
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
        sharing = context.uuids.count(context.uuids[context.rank])
        self.blocks = _BLOCKS_PER_SM * sm_count
        # Under MPS, the blocks that wait must leave room for those that they wait for.
        self.resident_blocks = self.blocks if sharing == 1 else max(1, sm_count // sharing)
        self._held: list[Any] = []

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.operation.dtype.itemsize

    def shapes_of_one(self) -> tuple[list[Shape], bool]:
        """Return the record of a field of one element."""
        return shapes_of((1,), [(self.itemsize,)], self.itemsize, "C")

    def zeros(self, nbytes: int) -> int:
        """Return the address of zeroed GPU memory, held until `close`."""
        return self.upload(cupy.zeros(max(nbytes, 1), "u1"))

    def upload(self, array: Any) -> int:
        """Copy an array to the GPU and return its address there; held until `close`."""
        self._held.append(cupy.asarray(array))
        return int(self._held[-1].data.ptr)

    def launch(
        self,
        name: str,
        size: tuple[int, int],
        arguments: Sequence[Any],
        *,
        is_row: bool,
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
        is_row : bool
            Whether fields are rows of elements.
        nranks : int, optional
            How many ranks reduce. Default: all.
        """
        nranks = nranks or self.size
        function = kernel(name, self.operation, nranks, self.device, contiguous=is_row)
        return driver.Launch(function, *size, arguments, self.where)

    def close(self) -> None:
        """Free what the launches read, once none is under way."""
        self._held = []


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

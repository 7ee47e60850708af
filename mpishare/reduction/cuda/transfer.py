"""Copies between a field in GPU memory and packed memory, for messages between nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from mpishare.backends import driver
from mpishare.backends.cuda_streams import borrowed, on_stream
from mpishare.coordination.mpi_agreement import never_free
from mpishare.memory.memory import address_of
from mpishare.memory.numbers import exchangeable
from mpishare.plans.gpu.fields import current_stream
from mpishare.plans.gpu.staging import DeviceStaging
from mpishare.reduction.across_nodes import Transfer
from mpishare.reduction.cuda.group import kernel_of
from mpishare.reduction.cuda.records import Shape, address_array
from mpishare.reduction.cuda.streamed import NO_EPOCH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.backends.suballocator import Suballocation
    from mpishare.memory.types import Order
    from mpishare.plans.comm import PlanComm
    from mpishare.plans.engine import PlanSetup
    from mpishare.reduction.operation import Operation

MIN_ON_GPU_NBYTES = 256 << 10
"""Fewer bytes are copied to the host and back in less time than an MPI takes to fetch them."""
_THREADS, _MAX_BLOCKS = 512, 256


class CudaTransfer(Transfer):
    """Transfer of fields in GPU memory: the host waits for their stream, with a deadline."""

    def __init__(self, setup: PlanSetup, operation: Operation, order: Order) -> None:
        super().__init__(operation, order)
        self._context, self._name = setup.context, setup.name
        backend: Any = setup.context.backend
        self._backend, self._device = backend, backend.device.ordinal

    def empty(self, count: int) -> Any:
        """Return new pinned memory."""
        dtype = self._operation.dtype
        pinned = cupy.cuda.alloc_pinned_memory(max(count, 1) * dtype.itemsize)
        return np.frombuffer(pinned, dtype, count)

    def fetch(self, field: Any, stream: Any, packed: Any) -> None:
        handle, owner = self._stream(field, stream)
        flat = cupy.asarray(exchangeable(field))
        if not self._is_packed(flat):
            with on_stream(borrowed(handle, self._device)):
                flat = flat.ravel(order=self._order)
        self._backend.copy(self._address_of(packed), flat.data.ptr, packed.nbytes, handle)
        self._context.synchronize(handle, self._name)
        del flat, owner  # held until here

    def store(self, packed: Any, field: Any, stream: Any) -> None:
        handle, owner = self._stream(field, stream)
        target = array = cupy.asarray(exchangeable(field))
        source = self._address_of(packed)
        if self._is_packed(array):
            self._backend.copy(array.data.ptr, source, packed.nbytes, handle)
        else:
            with on_stream(borrowed(handle, self._device)):
                target = cupy.empty(array.shape, array.dtype, self._order)
                self._backend.copy(target.data.ptr, source, packed.nbytes, handle)
                array[...] = target
        self._context.synchronize(handle, self._name)
        del target, owner  # held until here

    def _is_packed(self, array: Any) -> bool:
        flags = array.flags
        return bool(flags.c_contiguous if self._order == "C" else flags.f_contiguous)

    def _address_of(self, packed: Any) -> int:
        return address_of(packed)

    def _stream(self, field: Any, stream: Any) -> tuple[int, Any]:
        found = current_stream([field], self._device) if stream is None else stream
        handle, owner = self._backend.stream(found)
        return handle, owner


class GpuTransfer(CudaTransfer):
    """The same with packed memory on GPUs, for an MPI that takes pointers to it.

    All of it is memory of ``cuMemAlloc``, as in the trial of the MPI.
    """

    def __init__(self, setup: PlanSetup, operation: Operation, order: Order) -> None:
        super().__init__(setup, operation, order)
        self._blocks: list[Suballocation] = []
        self._staging: DeviceStaging | None = None
        self._nleaders = len({*setup.comm.nodes})
        self._own = 0

    def share(self, comm: PlanComm, call: str, leader: int, count: int) -> Any:
        """Return the packed result in memory of the leader's GPU."""
        dtype = self._operation.dtype
        sizes = dict.fromkeys(comm.ranks_here, 0) | {leader: count * dtype.itemsize}
        others = [] if comm.rank == leader else [leader]
        self._staging = staging = DeviceStaging(comm, call, sizes, others)

        def attach() -> None:
            self._own = int(self._backend.new_stream())
            # A kernel that is loaded later would wait for the streams.
            self._enqueue_fold([0] * self._nleaders, 0, 0)
            self._context.synchronize(self._own, self._name)
            staging.attach(self._own)

        try:
            staging.create()
            comm.step(call, attach)
        except BaseException:
            comm.step(call, self.release)
            self.close(is_over=True)
            raise
        self.nbytes = staging.nbytes
        return self._array(staging.address_of(leader), count)

    def empty(self, count: int) -> Any:
        """Return new GPU memory, held until `close`."""
        nbytes = count * self._operation.dtype.itemsize
        self._blocks.append(self._context.suballocator.allocate(max(nbytes, 1)))
        return self._array(self._blocks[-1].address, count)

    def buffer(self, array: Any) -> Any:
        from mpi4py import MPI

        return MPI.buffer.fromaddress(array.data.ptr, array.nbytes)

    def fold(self, operands: Sequence[Any], out: Any) -> None:
        """Combine on a stream of its own, and wait for that."""
        addresses = [each.data.ptr for each in operands]
        self._enqueue_fold(addresses, out.data.ptr, out.size)
        self._context.synchronize(self._own, self._name)

    def _enqueue_fold(self, addresses: Sequence[int], into: int, count: int) -> None:
        function = kernel_of("fold", self._operation, len(addresses), self._device, "ROW")
        of_row = Shape(), address_array(addresses)  # a row has no shape
        arguments = [*of_row, into, 0, count, *NO_EPOCH]
        blocks = max(1, min(-(-count // _THREADS), _MAX_BLOCKS))
        driver.Launch(function, blocks, _THREADS, arguments, self._name).enqueue(self._own)

    def release(self) -> None:
        if self._staging is not None:
            self._staging.release()

    def close(self, *, is_over: bool) -> None:
        """Free the memory, unless a message is under way."""
        if is_over:
            for block in self._blocks:
                block.close()
            if self._staging is not None:
                self._staging.close()
        else:
            never_free(self._blocks, self._staging)
        self._blocks, self._staging = [], None
        if self._own:
            self._backend.close_stream(self._own)
            self._own = 0

    def _address_of(self, packed: Any) -> int:
        return int(packed.data.ptr)

    def _array(self, address: int, count: int) -> Any:
        itemsize = self._operation.dtype.itemsize
        memory = cupy.cuda.UnownedMemory(address, count * itemsize, None, self._device)
        # Of elements of this size: CuPy need not know the dtype, as the kernel does.
        dtype = "c16" if itemsize == 16 else f"u{itemsize}"
        return cupy.ndarray(count, dtype, cupy.cuda.MemoryPointer(memory, 0))

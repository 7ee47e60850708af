"""Copies between a field in GPU memory and packed memory, for messages between nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from mpishare.backends.cuda_streams import borrowed, on_stream
from mpishare.memory.memory import address_of
from mpishare.memory.numbers import exchangeable
from mpishare.plans.gpu.fields import current_stream
from mpishare.plans.layout import array_of
from mpishare.reduction.across_nodes import Transfer

if TYPE_CHECKING:
    from mpishare.plans.engine import PlanSetup


class CudaTransfer(Transfer):
    """Transfer of fields in GPU memory: the host waits for their stream, with a deadline."""

    def __init__(self, setup: PlanSetup) -> None:
        super().__init__(setup)
        self._context, self._name = setup.context, setup.name
        backend: Any = setup.context.backend
        self._backend, self._device = backend, backend.device.ordinal

    def empty(self, count: int, dtype: np.dtype[Any]) -> Any:
        pinned = cupy.cuda.alloc_pinned_memory(max(count, 1) * dtype.itemsize)
        return np.frombuffer(pinned, dtype, count)

    def fetch(self, field: Any, stream: Any, packed: Any) -> None:
        handle, owner = self._stream(field, stream)
        flat = cupy.asarray(exchangeable(array_of(field)))
        if not self._is_packed(flat):
            with on_stream(borrowed(handle, self._device)):
                flat = flat.ravel(order=self._order)
        self._backend.copy(address_of(packed), flat.data.ptr, packed.nbytes, handle)
        self._context.wait_until(lambda: self._backend.is_done(handle), self._name)
        del flat, owner  # held until here

    def store(self, packed: Any, field: Any, stream: Any) -> None:
        handle, owner = self._stream(field, stream)
        target = array = cupy.asarray(exchangeable(array_of(field)))
        source = address_of(packed)
        if self._is_packed(array):
            self._backend.copy(array.data.ptr, source, packed.nbytes, handle)
        else:
            with on_stream(borrowed(handle, self._device)):
                target = cupy.empty(array.shape, array.dtype, self._order)
                self._backend.copy(target.data.ptr, source, packed.nbytes, handle)
                array[...] = target
        self._context.wait_until(lambda: self._backend.is_done(handle), self._name)
        del target, owner  # held until here

    def _is_packed(self, array: Any) -> bool:
        flags = array.flags
        return bool(flags.c_contiguous if self._order == "C" else flags.f_contiguous)

    def _stream(self, field: Any, stream: Any) -> tuple[int, Any]:
        found = current_stream([field], self._device) if stream is None else stream
        handle, owner = self._backend.stream(found)
        return handle, owner

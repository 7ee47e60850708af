"""Copies between a field in GPU memory and packed memory of the host, for what leaves the node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cupy

from mpishare.backends.cuda_streams import borrowed, on_stream
from mpishare.halo.cuda.fields import current_stream
from mpishare.halo.host.copies import address_of

if TYPE_CHECKING:
    import numpy as np

    from mpishare.halo.engine import PlanSetup
    from mpishare.reduction.order import Order


class CudaTransfer:
    """For fields in GPU memory: the host waits for their stream, with the deadline of the node.

    Parameters
    ----------
    setup : PlanSetup
        The plan's.
    order : {"C", "F"}
        How elements are packed.
    """

    def __init__(self, setup: PlanSetup, order: Order) -> None:
        self._context = setup.context
        backend: Any = setup.context.backend
        self._backend = backend
        self._device = backend.device.ordinal
        self._name = setup.name
        self._order = order

    def fetch(self, field: Any, stream: Any, packed: np.ndarray[Any, Any]) -> None:
        """Copy the elements of the field, once the stream has written them."""
        handle, owner = self._stream(field, stream)
        with on_stream(borrowed(handle, self._device)):
            flat = cupy.asarray(field).ravel(order=self._order)  # a view of a packed field
        self._backend.copy(address_of(packed), flat.data.ptr, packed.nbytes, handle)
        self._context.synchronize(handle, self._name)
        del flat, owner  # held until here

    def store(self, packed: np.ndarray[Any, Any], field: Any, stream: Any) -> None:
        """Copy the elements back."""
        handle, owner = self._stream(field, stream)
        array = cupy.asarray(field)
        flags = array.flags
        is_packed = flags.c_contiguous if self._order == "C" else flags.f_contiguous
        with on_stream(borrowed(handle, self._device)):
            target = array if is_packed else cupy.empty(array.shape, array.dtype, self._order)
            self._backend.copy(target.data.ptr, address_of(packed), packed.nbytes, handle)
            if target is not array:
                array[...] = target
        self._context.synchronize(handle, self._name)
        del target, owner  # held until here

    def _stream(self, field: Any, stream: Any) -> tuple[int, Any]:
        found = current_stream([field], self._device) if stream is None else stream
        handle, owner = self._backend.stream(found)
        return handle, owner

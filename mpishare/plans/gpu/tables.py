"""Arrays that the kernels of a plan read, copied to the GPU together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from mpishare.backends.suballocator import Suballocation
    from mpishare.runtime.context import NodeContext

_BLOCK_NBYTES = 32 << 10
_ALIGN = 256


class Tables:
    """Arrays in this rank's GPU memory for its kernels.

    One copy serves all of them, since a copy costs the driver more than its bytes do.
    """

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._blocks: list[tuple[Suballocation, np.ndarray[Any, Any]]] = []
        self._used = 0  # bytes of the last block

    def add(self, array: np.ndarray[Any, Any]) -> int:
        """Return the address that an array has once `upload` has copied it."""
        data = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        if not self._blocks or self._used + data.nbytes > self._blocks[-1][0].nbytes:
            block = self._context.suballocator.allocate_own(max(data.nbytes, _BLOCK_NBYTES))
            self._blocks.append((block, np.zeros(block.nbytes, np.uint8)))
            self._used = 0
        block, copied = self._blocks[-1]
        begin = self._used
        copied[begin : begin + data.nbytes] = data
        self._used = begin + -(-data.nbytes // _ALIGN) * _ALIGN
        return block.address + begin

    def upload(self, stream: int) -> None:
        """Enqueue the copies on a stream. The host memory is held until `close`."""
        backend: Any = self._context.backend
        for number, (block, copied) in enumerate(self._blocks, start=1):
            is_last = number == len(self._blocks)
            backend.upload(block.address, copied[: self._used] if is_last else copied, stream)

    def close(self) -> None:
        """Free the memory, once no kernel reads it."""
        while self._blocks:
            self._blocks.pop()[0].close()

"""The launches of a plan: how many blocks they have, and the tables that they read."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.backends import kernels
from mpishare.backends.graph_nodes import Asides
from mpishare.plans.gpu.sources import source
from mpishare.runtime.launch_order import ranks_per_gpu, sm_count, waiting_blocks

if TYPE_CHECKING:
    from pathlib import Path

    from mpishare.backends.suballocator import Suballocation
    from mpishare.runtime.context import NodeContext

_BLOCKS_PER_SM = 2  # enough to fill the links, with room for other work
_BLOCK_NBYTES = 32 << 10
_ALIGN = 256


@functools.cache
def kernel(path: Path, name: str, options: tuple[str, ...], device: int) -> int:
    """Return the driver's handle of a kernel, loaded on the current device, to which it belongs."""
    del device
    return kernels.kernel(source(path), name, options)


class PlanLauncher:
    """The tables of a plan's launches in this rank's GPU memory; `where` names the plan in errors.

    Not of CuPy's pool: its free memory may still be read by earlier work on its stream, and
    launches on other streams do not wait for that. Tables lie in blocks, each copied at once, since
    a copy costs the driver more than its bytes do.
    """

    def __init__(self, context: NodeContext, where: str) -> None:
        backend: Any = context.backend
        self.where = where
        self.device: int = backend.device.ordinal
        self.ranks_per_gpu = ranks_per_gpu(context)
        self.sm_count = sm_count(self.device)
        # Blocks of a launch that waits, and of one whose kernel does not.
        self.max_blocks = waiting_blocks(context, _BLOCKS_PER_SM)
        self.most_blocks = _BLOCKS_PER_SM * self.sm_count
        self.asides = Asides()
        self._context = context
        self._tables: list[tuple[Suballocation, np.ndarray[Any, Any]]] = []
        self._used = 0  # bytes of the last block

    def upload(self, array: np.ndarray[Any, Any]) -> int:
        """Return the address that an array has on the GPU after `load`; held until `close`."""
        data = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        if not self._tables or self._used + data.nbytes > self._tables[-1][0].nbytes:
            block = self._context.suballocator.allocate(max(data.nbytes, _BLOCK_NBYTES))
            self._tables.append((block, np.zeros(block.nbytes, np.uint8)))
            self._used = 0
        block, copied = self._tables[-1]
        begin = self._used
        copied[begin : begin + data.nbytes] = data
        self._used = begin + -(-data.nbytes // _ALIGN) * _ALIGN
        return block.address + begin

    def zeros(self, nbytes: int) -> int:
        """Return the address of zeroed GPU memory after `load`; held until `close`."""
        return self.upload(np.zeros(max(nbytes, 1), np.uint8))

    def load(self, stream: int) -> None:
        """Enqueue the copies of the tables, before the first launch; host memory is held, too."""
        backend: Any = self._context.backend
        for number, (block, copied) in enumerate(self._tables, start=1):
            is_last = number == len(self._tables)
            backend.upload(block.address, copied[: self._used] if is_last else copied, stream)

    def close(self) -> None:
        while self._tables:
            self._tables.pop()[0].close()

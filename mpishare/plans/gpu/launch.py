"""The launches of a plan: how many blocks may wait at once, and the tables that they read."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from mpishare.backends import kernels
from mpishare.plans.gpu.sources import source

if TYPE_CHECKING:
    from pathlib import Path

    from mpishare.backends.suballocator import Suballocation
    from mpishare.runtime.context import NodeContext

_BLOCKS_PER_SM = 2  # enough to fill the links, with room for other work
_SM_COUNT = 16  # cudaDevAttrMultiProcessorCount
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
        self._has_mps = backend.device.mps
        # Ranks of other nodes on this machine count too.
        self.ranks_per_gpu = context.all_uuids.count(context.uuids[context.rank])
        self._context = context
        self._tables: list[tuple[Suballocation, np.ndarray[Any, Any]]] = []
        self._used = 0  # bytes of the last block

    @functools.cached_property
    def sm_count(self) -> int:
        return int(cupy.cuda.runtime.deviceGetAttribute(_SM_COUNT, self.device))

    @property
    def most_blocks(self) -> int:
        """Blocks of a launch whose kernel does not wait for other ranks."""
        return _BLOCKS_PER_SM * self.sm_count

    @property
    def max_blocks(self) -> int:
        """Blocks of a launch that waits, so that the launches of all ranks on a GPU fit at once."""
        if self.ranks_per_gpu == 1 or not self._has_mps:
            # The GPU is this rank's alone, always or for a time slice.
            return self.most_blocks
        # Under MPS the waiting ranks together must leave room for the one they wait for. With half
        # a block per SM each (half of what fits) four ranks were seen to wait for a kernel that was
        # not scheduled.
        return max(1, self.sm_count // self.ranks_per_gpu)

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
        """Free the tables, once no launch is under way."""
        while self._tables:
            self._tables.pop()[0].close()

"""The launches of a plan: how many blocks may wait at once, and the data that they read."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from mpishare.plans.gpu.tables import Tables

if TYPE_CHECKING:
    from mpishare.runtime.context import NodeContext

_BLOCKS_PER_SM = 2  # enough to fill the links, with room for other work
_SM_COUNT = 16  # cudaDevAttrMultiProcessorCount


class PlanLauncher:
    """Data of a plan's launches in this rank's GPU memory; `where` names the plan in errors.

    Not of CuPy's pool: its free memory may still be read by earlier work on its stream, and
    launches on other streams do not wait for that.
    """

    def __init__(self, context: NodeContext, where: str) -> None:
        backend: Any = context.backend
        self.where = where
        self.device: int = backend.device.ordinal
        self._has_mps = backend.device.mps
        # Ranks of other nodes on this machine count too.
        self.ranks_per_gpu = context.all_uuids.count(context.uuids[context.rank])
        self._tables = Tables(context)

    @cached_property
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
        return self._tables.add(array)

    def zeros(self, nbytes: int) -> int:
        """Return the address of zeroed GPU memory after `load`; held until `close`."""
        return self.upload(np.zeros(max(nbytes, 1), np.uint8))

    def load(self, stream: int) -> None:
        """Enqueue the copies of the launches' data, before the first launch."""
        self._tables.upload(stream)

    def close(self) -> None:
        """Free the launches' data, once none is under way."""
        self._tables.close()

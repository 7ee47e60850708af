"""How many blocks of a kernel that waits for other ranks may be on a GPU at once."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import cupy

if TYPE_CHECKING:
    from mpishare.runtime.context import NodeContext

_SM_COUNT = 16  # cudaDevAttrMultiProcessorCount


@functools.cache
def sm_count(device: int) -> int:
    """Return the number of multiprocessors of a GPU."""
    return int(cupy.cuda.runtime.deviceGetAttribute(_SM_COUNT, device))


def ranks_per_gpu(context: NodeContext) -> int:
    """Return how many ranks use this rank's GPU; those of other nodes on this machine count too."""
    return context.all_uuids.count(context.uuids[context.rank])


def waiting_blocks(context: NodeContext, per_sm: int) -> int:
    """Return the most blocks of a launch, so that the launches of all ranks on a GPU fit at once.

    `per_sm` are those of one rank that a multiprocessor takes.
    """
    backend: Any = context.backend
    device = backend.device
    sms, nranks = sm_count(device.ordinal), ranks_per_gpu(context)
    if nranks == 1 or not device.mps:
        # The GPU is this rank's alone, always or for a time slice.
        return per_sm * sms
    # Under MPS the waiting ranks together must leave room for the one they wait for. With half
    # a block per SM each (half of what fits) four ranks were seen to wait for a kernel that was
    # not scheduled.
    return min(per_sm, 1) * max(1, sms // nranks)

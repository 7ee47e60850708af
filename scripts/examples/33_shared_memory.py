"""Shared memory that another library made becomes a window where it is.

    mpirun -n 3 python -m mpi4py scripts/examples/33_shared_memory.py

Without a GPU: windows in GPU memory take no host memory in place, so this node is of the host.
"""

from multiprocessing import shared_memory

import numpy as np

import mpishare

with mpishare.Node(backend="host") as node:
    # As a data loader or a worker of multiprocessing would have made it.
    block = shared_memory.SharedMemory(create=True, size=8 * 1024)
    values = np.ndarray(1024, "f8", block.buf)
    values[...] = node.rank
    with node.share_each(values[24:], copy=False) as window:
        window.fence()
        right = (node.rank + 1) % node.size
        window.segment(right)[0] = 100 + node.rank  # lands in my right neighbor's block
        window.fence()
    left = (node.rank - 1) % node.size
    is_right = values[24] == 100 + left and bool((values[25:] == node.rank).all())
    del values, window  # arrays keep the block mapped
    block.close()
    block.unlink()
    if not is_right:
        raise SystemExit(f"rank {node.rank}: WRONG")
    node.barrier()
    if node.is_leader:
        print("a block of multiprocessing is a window: right")

"""A table in the memory of one rank: all read it, and its owner changes it between two fences.

    mpirun -n 4 python -m mpi4py scripts/examples/01_shared_table.py

The order of every use is the same: read, fence, write, fence.
"""

import mpishare

with mpishare.Node() as node:
    xp = node.xp  # CuPy where there are GPUs, NumPy elsewhere
    # The leader alone calls it; the result is copied into memory that every rank maps.
    table = node.share(lambda: xp.arange(1000.0) ** 2)

    before = table.array.sum()  # every rank reads the leader's memory
    table.fence()  # all have read
    if node.is_leader:
        table.array[:] *= 2
    table.fence()  # it is written
    after = table.array.sum()

    node.synchronize()  # block until my stream is done (raises if a peer died)
    right = sum(k**2 for k in range(1000))
    if (float(before), float(after)) != (right, 2 * right):
        raise SystemExit(f"rank {node.rank}: WRONG: {before} and {after}")
    node.barrier()
    if node.is_leader:
        print(f"{node.size} ranks read {right} and then {2 * right}: right")

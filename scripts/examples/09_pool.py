"""A pool: one rank allocates arrays of sizes that only it knows, others open them by a handle.

    mpirun -n 3 python -m mpi4py scripts/examples/09_pool.py

A window is made by all ranks together. A pool is made once; after that `allocate` and `open` are
local, and a handle is some bytes, sent by whatever the program has.
"""

import numpy as np

import mpishare

PATCHES = 20

with mpishare.Node() as node:
    xp, comm = node.xp, node.comm
    pool = node.pool()  # of the leader's memory
    if node.is_leader:
        sizes = np.random.default_rng(7).integers(1, 5000, PATCHES)
        patches = [pool.allocate(int(size)) for size in sizes]
        for number in range(PATCHES):
            patches[number][...] = number
        node.synchronize()  # written, before anybody hears of them
        comm.bcast([pool.handle(patch) for patch in patches])
    else:
        patches = [pool.open(handle) for handle in comm.bcast(None)]  # the same bytes, no copy
    sums = [float(patch.sum()) for patch in patches]
    right = [float(number * patch.size) for number, patch in enumerate(patches)]
    if sums != right:
        raise SystemExit(f"rank {node.rank}: WRONG: {sums}")
    total = comm.allreduce(sum(sums))  # all have read
    for number in range(node.rank, PATCHES, node.size):  # each writes some, from its own GPU
        patches[number][...] = -number
    node.synchronize()
    node.barrier()  # all have written
    if any(int((patch != -number).sum()) for number, patch in enumerate(patches)):
        raise SystemExit(f"rank {node.rank}: WRONG: not all is written")
    # The others let go before the owner does.
    patches.clear()
    node.barrier()
    if node.is_leader:
        print(f"{PATCHES} patches on {node.size} ranks, sum {total / node.size:.0f} on each: right")

"""Twenty-four blocks of a grid on three ranks: one plan for all, one launch on a GPU.

    mpirun -n 3 python -m mpi4py scripts/examples/45_blocks.py

Blocks are dealt out by any rule: here the dear ones in the middle are spread over the ranks.
"""

import numpy as np
from mpi4py import MPI

import mpishare

comm = MPI.COMM_WORLD
rows, columns, n = 4, 6, 5  # blocks, and cells of each along both axes
owners = np.add.outer(np.arange(rows), 2 * np.arange(columns)) % comm.size
mine = [(row, column) for row, column in np.argwhere(owners == comm.rank).tolist()]
whole = np.arange(float(rows * n * columns * n)).reshape(rows * n, columns * n)
padded = np.pad(whole, 1, "wrap")
seams = mpishare.seams.blocks(owners, 1, comm.rank, periods=True, corners=True)

with mpishare.Node() as node:
    right = [node.xp.asarray(padded[r * n : r * n + n + 2, c * n : c * n + n + 2]) for r, c in mine]
    blocks = [node.xp.full((n + 2, n + 2), -1.0) for _ in mine]
    for block, expected in zip(blocks, right, strict=True):
        block[1:-1, 1:-1] = expected[1:-1, 1:-1]
    with mpishare.SeamExchange(comm, blocks, seams, node=node, backend=node.backend) as plan:
        plan.exchange(*blocks)
    pairs = zip(blocks, right, strict=True)
    if not all(bool((block == expected).all()) for block, expected in pairs):
        raise SystemExit(f"rank {comm.rank}: WRONG")
comm.Barrier()
if comm.rank == 0:
    print(f"{rows * columns} blocks on {comm.size} ranks, {len(mine)} on the first: right")

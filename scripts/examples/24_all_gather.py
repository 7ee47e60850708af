"""Parts of unequal length: all of them on every rank, then all of them on one.

    mpirun -n 4 python -m mpi4py scripts/examples/24_all_gather.py

Each rank names its own part by a `Box`. As `target`, None is the whole on every rank, and `OnRank`
the whole on one rank: an all-gather and a gather are redistributions, too.
"""

import numpy as np
from mpi4py import MPI

import mpishare

world = MPI.COMM_WORLD
length = 3 + 2 * world.rank
begin = world.exscan(length) or 0
total = world.allreduce(length)
mine = mpishare.Box((begin,), (begin + length,))
last = mpishare.OnRank(world.size - 1)

with (
    mpishare.Node() as node,
    mpishare.Redistribute(world, total, mine, None, node=node) as on_all,
    mpishare.Redistribute(world, total, mine, last, node=node) as on_one,
):
    right = True
    for step in range(3):
        part = node.xp.arange(float(begin), float(begin + length)) + step
        everything = on_all.forward(part)
        gathered = on_one.forward(part)  # of no length on the other ranks
        expected = node.xp.asarray(np.arange(float(total)) + step)
        right &= bool((everything == expected).all())
        right &= len(gathered) == (total if world.rank == world.size - 1 else 0)
        right &= bool((gathered == expected[: len(gathered)]).all())
    if not world.allreduce(right, MPI.LAND):
        raise SystemExit("WRONG: a part is not where it belongs")
    if node.is_leader:
        print(f"{world.size} ranks, parts of 3 to {1 + 2 * world.size} numbers: right")

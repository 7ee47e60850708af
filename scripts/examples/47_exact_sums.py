"""A dot product whose bits no partition changes: `Allreduce(..., exact=True)`.

    mpirun -n 4 python -m mpi4py scripts/examples/47_exact_sums.py

Each rank has a part of the same long vector: equal parts, unequal ones, then one rank has it all.
The last bits of plain sums depend on where it is cut; the exact one does not.
"""

import numpy as np
from mpi4py import MPI

import mpishare

COUNT = 100_003

with mpishare.Node() as node:
    comm, xp = MPI.COMM_WORLD, node.xp
    rng = np.random.default_rng(1)  # the same numbers on every rank
    x, y = rng.standard_normal((2, COUNT)) * 10.0 ** rng.integers(-9, 9, (2, COUNT))
    equal = [COUNT * rank // comm.size for rank in range(comm.size + 1)]
    unequal = [0, *sorted(rng.integers(0, COUNT, comm.size - 1).tolist()), COUNT]
    alone = [0] + [COUNT] * comm.size  # the first rank has everything
    plain = mpishare.Allreduce(comm, mpishare.Layout(1), node=node)
    exact = mpishare.Allreduce(comm, mpishare.Layout(1), exact=True, node=node)
    found = []
    for ends in equal, unequal, alone:
        mine = slice(*ends[comm.rank : comm.rank + 2])
        a, b = xp.asarray(x[mine]), xp.asarray(y[mine])
        in_order = float(plain.dot(a, b))
        found.append(float(exact.dot(a, b)))
        if comm.rank == 0:
            print(f"plain {in_order.hex()}, exact {found[-1].hex()}")
    if len(set(found)) > 1:
        raise SystemExit(f"WRONG: {found}")
    if comm.rank == 0:
        print(f"{comm.size} ranks: right")

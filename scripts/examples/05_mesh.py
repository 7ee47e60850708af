"""An unstructured mesh: each rank owns some vertices and needs copies of others, its ghosts.

    mpirun -n 4 python -m mpi4py scripts/examples/05_mesh.py

The owners of ghosts are found by their global numbers. `NeighborExchange(comm, sends, recvs, ...)`
takes the places of both sides instead, where a program has them.
"""

import numpy as np
from mpi4py import MPI

import mpishare

OWNED = 50  # vertices per rank; rank r owns the numbers from r * OWNED on

comm = MPI.COMM_WORLD
total, first = OWNED * comm.size, OWNED * comm.rank
edges = np.random.default_rng(7).integers(total, size=(3 * total, 2))  # the same on all ranks
# An edge belongs to the owner of its first vertex; what else it touches is a ghost there.
mine = edges[edges[:, 0] // OWNED == comm.rank]
ghosts = np.unique(mine[mine[:, 1] // OWNED != comm.rank, 1])

numbers = np.concatenate([np.arange(first, first + OWNED), ghosts])  # of all places of my array

with mpishare.Node() as node:
    xp = node.xp
    field = xp.zeros((len(numbers), 2))  # two values per vertex
    exchange = mpishare.NeighborExchange.from_global_ids(comm, numbers, OWNED, field, node=node)

    # Owners to ghosts: each ghost becomes a copy of its vertex.
    values = xp.asarray(np.stack([numbers, 10.0 * numbers], axis=1))
    field[:OWNED] = values[:OWNED]
    exchange.exchange(field)
    right = {"copies": bool((field == values).all())}

    # Ghosts to owners: count the edges of other ranks that end at my vertices.
    field[...] = 0
    cut = mine[np.isin(mine[:, 1], ghosts), 1]
    counts = np.bincount(np.searchsorted(ghosts, cut), minlength=len(ghosts))
    field[OWNED:] = xp.asarray(counts)[:, None]
    exchange.accumulate(field)
    cut_anywhere = edges[edges[:, 0] // OWNED != edges[:, 1] // OWNED, 1]
    sums = np.bincount(cut_anywhere, minlength=total)[first : first + OWNED]
    right["sums"] = bool((field[:OWNED] == xp.asarray(sums)[:, None]).all())

    # Both ways: all ranks add what their edges give a vertex, and each of them gets the sum.
    order = np.argsort(numbers)
    ends = order[np.searchsorted(numbers, mine.ravel(), sorter=order)]
    field[...] = xp.asarray(np.bincount(ends, minlength=len(numbers)))[:, None]
    exchange.accumulate(field, give_back=True)
    degrees = np.bincount(edges.ravel(), minlength=total)[numbers]
    right["degrees"] = bool((field == xp.asarray(degrees)[:, None]).all())
    exchange.close()

    if not all(right.values()):
        raise SystemExit(f"rank {comm.rank}: WRONG: {right=}")
    sizes = comm.gather(len(ghosts))
    if comm.rank == 0:
        print(f"{total} vertices on {comm.size} ranks, ghosts {sizes}: right")

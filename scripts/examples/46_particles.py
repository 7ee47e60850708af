"""Particles that change their rank, in arrays with spare rows: `RowExchange` and `Migration`.

    mpirun -n 4 python -m mpi4py scripts/examples/46_particles.py

Each rank has a part of a ring. Particles fly at their own speeds; after each step those that have
left a part go to the rank of their place. No rank learns on the host how many.
"""

from mpi4py import MPI

import mpishare

comm = MPI.COMM_WORLD
COUNT, CAPACITY, STEPS = 1000, 4000, 50

with mpishare.Node(comm) as node:
    xp = node.xp
    x, v = xp.zeros(CAPACITY), xp.zeros(CAPACITY)
    ids, to = xp.zeros(CAPACITY, "i8"), xp.zeros(CAPACITY, "i4")
    ids[:COUNT] = xp.arange(COUNT) + COUNT * comm.rank
    x[:COUNT] = comm.rank + (xp.arange(COUNT) + 0.5) / COUNT
    v[:COUNT] = ((7 * ids[:COUNT]) % 11 - 5) / 64
    count = xp.array(COUNT, "i8")

    swap = mpishare.RowExchange(comm, ["f8", "f8", "i8"], CAPACITY, node=node)
    move = mpishare.Migration(swap)

    def advance():
        """Every particle moves, and goes where it belongs: one launch on GPUs."""
        x[...] = (x + v) % comm.size
        to[...] = x.astype("i4")
        move.migrate([x, v, ids], to, count)

    step = mpishare.capture(node, advance)
    for _ in range(STEPS):
        step()

    move.check()
    n = int(count)
    start = (ids[:n] // COUNT) + (ids[:n] % COUNT + 0.5) / COUNT
    expected = (start + STEPS * ((7 * ids[:n]) % 11 - 5) / 64) % comm.size
    assert bool((abs(x[:n] - expected) < 1e-9).all())
    assert bool((x[:n].astype("i4") == comm.rank).all())
    assert comm.allreduce(n) == COUNT * comm.size
    assert comm.allreduce(int(ids[:n].sum())) == sum(range(COUNT * comm.size))
    step.close()
    swap.close()

print(f"rank {comm.rank}: {n} particles right")

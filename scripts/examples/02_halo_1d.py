"""Diffusion on a ring, cut into one block per rank: a ghost cell on each side, one exchange a step.

    mpirun -n 4 python -m mpi4py scripts/examples/02_halo_1d.py

Fields lie in windows, so that neighbors reach them without a copy between; any array would do.
"""

import math

from mpi4py import MPI

import mpishare

CELLS, STEPS, SHARE = 64, 200, 0.25  # owned cells per rank; the part that a neighbor gets per step

with mpishare.Node() as node:
    xp = node.xp
    cart = MPI.COMM_WORLD.Create_cart([MPI.COMM_WORLD.size], periods=[True])
    # Fields in windows: the neighbors may write their cells straight into the ghosts.
    u, v = (node.allocate_each(CELLS + 2).array for _ in range(2))
    halo = mpishare.HaloExchange(cart, u, width=1, node=node)

    total = CELLS * cart.size
    x = CELLS * cart.rank + xp.arange(CELLS)  # global numbers of my cells
    u[halo.owned] = xp.cos(2 * math.pi * x / total)
    for _ in range(STEPS):
        halo.exchange(u)
        v[1:-1] = u[1:-1] + SHARE * (u[:-2] - 2 * u[1:-1] + u[2:])
        u, v = v, u
    halo.close()

    # A wave keeps its form: each step multiplies it by the same factor.
    factor = 1 - 2 * SHARE * (1 - math.cos(2 * math.pi / total))
    right = factor**STEPS * xp.cos(2 * math.pi * x / total)
    error = cart.allreduce(float(abs(u[1:-1] - right).max()), MPI.MAX)
    if error > 1e-12:
        raise SystemExit(f"WRONG: off by {error}")
    if cart.rank == 0:
        print(f"{cart.size} ranks, {STEPS} steps, error {error:.0e}: right")

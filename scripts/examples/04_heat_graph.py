"""Heat in a periodic box: a step, exchange and all, is one launch of a CUDA graph.

    mpirun -n 4 python -m mpi4py scripts/examples/04_heat_graph.py

Without a GPU the step is called.
"""

import math

from mpi4py import MPI

import mpishare

N, STEPS, SHARE = 24, 100, 0.1  # cells per rank along each axis
KEEP = 1 - 6 * SHARE


def advance(u, v):
    """Bring the ghosts of `u` up to date, and set `v`."""
    halo.exchange(u)
    inner = v[1:-1, 1:-1, 1:-1]
    xp.add(u[:-2, 1:-1, 1:-1], u[2:, 1:-1, 1:-1], out=inner)
    for face in (u[1:-1, :-2, 1:-1], u[1:-1, 2:, 1:-1], u[1:-1, 1:-1, :-2], u[1:-1, 1:-1, 2:]):
        inner += face
    inner *= SHARE / KEEP
    inner += u[1:-1, 1:-1, 1:-1]
    inner *= KEEP


with mpishare.Node() as node:
    xp, world = node.xp, MPI.COMM_WORLD
    cart = world.Create_cart(MPI.Compute_dims(world.size, 3), periods=[True] * 3)
    u, v = (node.allocate_each((N + 2,) * 3, fill=0).array for _ in range(2))
    halo = mpishare.HaloExchange(cart, u, width=1, node=node)
    waves = [2 * math.pi / (N * dim) for dim in cart.dims]
    x = [wave * (N * c + xp.arange(N)) for wave, c in zip(waves, cart.coords, strict=True)]
    mode = u[halo.owned] = xp.cos(x[0])[:, None, None] * xp.cos(x[1])[:, None] * xp.cos(x[2])

    step = mpishare.capture(node, advance)
    for _ in range(STEPS):
        step(u, v)
        u, v = v, u

    factor = (KEEP + 2 * SHARE * sum(map(math.cos, waves))) ** STEPS
    error = cart.allreduce(float(abs(u[halo.owned] - factor * mode).max()), MPI.MAX)
    if error > 1e-12:
        raise SystemExit(f"WRONG: off by {error}")
    if cart.rank == 0:
        print(f"{cart.dims} ranks, {STEPS} steps, error {error:.0e}: right")

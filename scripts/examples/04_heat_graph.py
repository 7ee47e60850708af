"""Heat in a periodic box: exchanges and updates captured once into a CUDA graph, then replayed.

    mpirun -n 4 python -m mpi4py scripts/examples/04_heat_graph.py

Without a GPU the same steps are called.
"""

import math

from mpi4py import MPI

import mpishare

N, PAIRS, SHARE = 24, 50, 0.1  # cells per rank along each axis; pairs of steps
KEEP = 1 - 6 * SHARE


def step(u, v):
    """Bring the ghosts of `u` up to date, and set `v`. In place: a graph must allocate nothing."""
    halo.exchange(u)
    inner = v[1:-1, 1:-1, 1:-1]
    xp.add(u[:-2, 1:-1, 1:-1], u[2:, 1:-1, 1:-1], out=inner)
    for face in (u[1:-1, :-2, 1:-1], u[1:-1, 2:, 1:-1], u[1:-1, 1:-1, :-2], u[1:-1, 1:-1, 2:]):
        inner += face
    inner *= SHARE / KEEP
    inner += u[1:-1, 1:-1, 1:-1]
    inner *= KEEP


def two_steps():  # a graph that begins and ends with `u`
    step(u, v)
    step(v, u)


with mpishare.Node() as node:
    xp, world = node.xp, MPI.COMM_WORLD
    if node.backend == "cuda":  # a capture needs a stream of its own
        stream = xp.cuda.Stream(non_blocking=True).use()
    cart = world.Create_cart(MPI.Compute_dims(world.size, 3), periods=[True] * 3)
    u, v = (node.allocate_each((N + 2,) * 3, fill=0).array for _ in range(2))
    halo = mpishare.HaloExchange(cart, u, width=1, node=node)
    waves = [2 * math.pi / (N * dim) for dim in cart.dims]
    x = [wave * (N * c + xp.arange(N)) for wave, c in zip(waves, cart.coords, strict=True)]
    mode = u[halo.owned] = xp.cos(x[0])[:, None, None] * xp.cos(x[1])[:, None] * xp.cos(x[2])

    two_steps()  # the first ones load the kernels
    go_on = two_steps
    if node.backend == "cuda":
        stream.begin_capture()
        two_steps()
        go_on = stream.end_capture().launch
    for _ in range(PAIRS - 1):
        go_on()

    factor = (KEEP + 2 * SHARE * sum(map(math.cos, waves))) ** (2 * PAIRS)
    error = cart.allreduce(float(abs(u[halo.owned] - factor * mode).max()), MPI.MAX)
    if error > 1e-12:
        raise SystemExit(f"WRONG: off by {error}")
    if cart.rank == 0:
        print(f"{cart.dims} ranks, {2 * PAIRS} steps, error {error:.0e}: right")

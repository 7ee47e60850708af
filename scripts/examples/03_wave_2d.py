"""A wave on a torus: the interior is computed while the faces travel, the shell afterwards.

    mpirun -n 4 python -m mpi4py scripts/examples/03_wave_2d.py

On GPUs the interior hides the exchange. On the host nothing travels between start and wait: there
`halo.exchange(now)` and one update of all cells is faster.
"""

import math

from mpi4py import MPI

import mpishare

N, STEPS, SPEED = 64, 100, 0.5  # cells per rank along each axis; cells per step
SQUARE = SPEED**2


def update(box, old, now):
    """Replace the cells of `old` in this box by those of the next step."""
    neighbors = sum(now[halo.shifted(box, axis, by)] for axis in (0, 1) for by in (-1, 1))
    old[box] = 2 * now[box] - old[box] + SQUARE * (neighbors - 4 * now[box])


with mpishare.Node() as node:
    xp, world = node.xp, MPI.COMM_WORLD
    cart = world.Create_cart(MPI.Compute_dims(world.size, 2), periods=[True, True])
    old, now = (node.allocate_each((N + 2, N + 2), fill=0).array for _ in range(2))
    halo = mpishare.HaloExchange(cart, now, width=1, node=node)

    # A plane wave along the diagonal solves the discrete equation exactly.
    kx, ky = (2 * math.pi / (N * dim) for dim in cart.dims)
    i, j = (N * c + xp.arange(N) for c in cart.coords)
    phase = (kx * i)[:, None] + (ky * j)[None, :]
    omega = 2 * math.asin(SPEED * math.hypot(math.sin(kx / 2), math.sin(ky / 2)))
    old[halo.owned], now[halo.owned] = xp.cos(phase + omega), xp.cos(phase)

    for _ in range(STEPS):
        halo.start(now)
        update(halo.interior, old, now)  # on GPUs beside the exchange
        halo.wait()
        for box in halo.shell:
            update(box, old, now)
        old, now = now, old

    error = float(abs(now[halo.owned] - xp.cos(phase - STEPS * omega)).max())
    error = cart.allreduce(error, MPI.MAX)
    halo.close()
    if error > 1e-10:
        raise SystemExit(f"WRONG: off by {error}")
    if cart.rank == 0:
        print(f"{cart.dims} ranks, {STEPS} steps, error {error:.0e}: right")

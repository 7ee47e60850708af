"""Repeat a step until nothing changes: a loop on the GPU, launched once.

    mpirun -n 4 python -m mpi4py scripts/examples/17_until.py

Heat in a rod whose ends are kept at 0 and 1: it ends on a straight line.
"""

from mpi4py import MPI

import mpishare

N, TOLERANCE = 8, 1e-9  # cells per rank; the change of a step


def advance(u, v):
    """Bring the ghosts of `u` up to date, and set `v` to the mean of its neighbors."""
    halo.exchange(u)
    v[1:-1] = (u[:-2] + u[2:]) / 2


def relax(u, v, change):
    """Make two steps, which end in `u`, and find the largest change on any rank."""
    advance(u, v)
    advance(v, u)
    change[0] = abs(u - v).max()
    largest.reduce(change)


def is_still(*fields):
    """Say whether to end; the same on every rank, as the change is."""
    return fields[-1] < TOLERANCE


with mpishare.Node() as node:
    xp, world = node.xp, MPI.COMM_WORLD
    cart = world.Create_cart([world.size], [False])
    u, v, change = xp.zeros(N + 2), xp.zeros(N + 2), xp.zeros(1)
    if cart.rank == cart.size - 1:
        u[-1] = v[-1] = 1  # a ghost without an owner stays as it is
    halo = mpishare.HaloExchange(cart, u, width=1, node=node)
    largest = mpishare.Allreduce(cart, change, "max", node=node)

    solve = mpishare.capture(node, relax, until=is_still, at_most=100_000)
    solve(u, v, change)

    line = (N * cart.rank + xp.arange(1, N + 1)) / (N * cart.size + 1)
    error = cart.allreduce(float(abs(u[1:-1] - line).max()), MPI.MAX)
    if error > 1e-6:
        raise SystemExit(f"WRONG: off by {error}")
    if cart.rank == 0:
        print(f"{cart.size} ranks, {2 * int(solve.iterations[0])} steps, error {error:.0e}: right")

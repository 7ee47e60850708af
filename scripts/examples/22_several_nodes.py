"""A halo over several nodes: how each neighbor is reached, and how to read it.

    mpirun -n 4 python -m mpi4py scripts/examples/22_several_nodes.py

Inside a node ranks share memory, and to other nodes cells go by NCCL or by MPI messages: out of
GPU memory where the MPI takes that. With all ranks on one node this program sends messages there,
too. The interior is computed while they travel, on GPUs beside any route; on the host nothing else
travels between start and wait, so that `exchange` and one update of all cells is faster there.
"""

import logging
import os
import sys

from mpi4py import MPI

import mpishare

ROWS, COLUMNS, STEPS, SHARE = 32, 16, 50, 0.25  # owned rows per rank; what a neighbor gets per step

# mpishare warns where messages go through the host, and says why. To stdout here.
logging.basicConfig(stream=sys.stdout, format="%(name)s: %(message)s")


def step(box, old, new):
    """Diffuse along the rows' axis, inside of a box."""
    above, below = old[halo.shifted(box, 0, -1)], old[halo.shifted(box, 0, 1)]
    new[box] = old[box] + SHARE * (above - 2 * old[box] + below)


with mpishare.Node() as node:
    xp, world = node.xp, MPI.COMM_WORLD
    if node.size == world.size:
        os.environ.setdefault("MPISHARE_ROUTE", "mpi")  # for tests: messages inside a node
    cart = world.Create_cart([world.size], periods=[True])
    # Slabs: each face lies in one piece, and goes out of the field without a copy before.
    u, v = (node.allocate_each((ROWS + 2, COLUMNS), fill=0).array for _ in range(2))
    with mpishare.HaloExchange(cart, u, width=1, axes=(0,), node=node) as halo:
        routes = world.allgather(halo.routes)
        u[halo.owned] = 0
        if world.rank == 0:
            u[ROWS // 2] = 1  # warm rows
        for _ in range(STEPS):
            halo.start(u)
            step(halo.interior, u, v)  # while the messages travel
            halo.wait()
            for box in halo.shell:
                step(box, u, v)
            u, v = v, u
        heat, tail = float(u[halo.owned].sum()), float(u[halo.owned].max())

    heats, tails = world.allgather(heat), world.allgather(tail)
    if world.rank == 0:
        for rank, found in enumerate(routes):
            print(f"rank {rank}:", ", ".join(f"rank {r} by {route}" for r, route in found.items()))
        if abs(sum(heats) - COLUMNS) > 1e-9 or (world.size > 1 and not 0 < tails[1] < tails[0]):
            raise SystemExit(f"WRONG: heat {heats}, {tails}")
        print(f"{world.size} ranks, {STEPS} steps, no heat is lost: right")

"""A shearing box: both ends of x meet shifted along y, by another number of cells at each step.

    mpirun -n 3 python -m mpi4py scripts/examples/43_shearing_box.py

y is cut over the ranks. Which of them send follows from the shift: the columns at the other end of
x are a ring of boxes, and each rank reads from a place of it that is new at each call.
"""

import numpy as np
from mpi4py import MPI

import mpishare

comm = MPI.COMM_WORLD
nx, ny, w = 6, 4, 2  # owned cells of a rank along each axis, ghosts
every = comm.size * ny
first = comm.rank * ny - w  # in the whole, of this rank's first cell along y, a ghost
x, y = np.arange(-w, nx + w)[:, None], first + np.arange(ny + 2 * w)


def ring(columns):
    """The owned cells of all ranks in these columns of x, end to end along y."""
    return [(rank, 0, np.s_[columns, w:-w]) for rank in range(comm.size)]


seams = [
    mpishare.Seam((0, np.s_[:w, :]), ring(slice(-2 * w, -w)), along=1, start=first, shift="low"),
    mpishare.Seam((0, np.s_[-w:, :]), ring(slice(w, 2 * w)), along=1, start=first, shift="high"),
]

with mpishare.Node() as node:
    u = node.xp.zeros((nx + 2 * w, ny + 2 * w))
    with mpishare.SeamExchange(comm, u, seams, node=node) as plan:
        for step in range(20):
            moved = 3 * step + 1  # cells by which one end has moved past the other
            plane = 1000 * x + y % every
            u[...] = -1
            u[w:-w, w:-w] = node.xp.asarray(plane[w:-w, w:-w])
            plan.exchange(u, shift={"low": moved, "high": -moved})
            low = node.xp.asarray(1000 * (x[:w] + nx) + (y + moved) % every)
            high = node.xp.asarray(1000 * (x[-w:] - nx) + (y - moved) % every)
            if not bool((u[:w] == low).all() and (u[-w:] == high).all()):
                raise SystemExit(f"rank {comm.rank}: WRONG in step {step}")
comm.Barrier()
if comm.rank == 0:
    print(f"{comm.size} ranks, 20 shifts of one plan: right")

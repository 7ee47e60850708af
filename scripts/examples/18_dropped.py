"""Plans and windows that are dropped, not closed: the next collective call closes them.

    mpirun -n 2 python -m mpi4py scripts/examples/18_dropped.py

A solver that is called a thousand times, and cleans up as Python does: by forgetting.
"""

from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpishare

CALLS = 1000


def smooth(comm, u):
    """One step of a solver, which makes all that it needs, and closes nothing."""
    cart = comm.Create_cart([comm.size], periods=[True])
    halo = mpishare.HaloExchange(cart, u, 1)
    halo.exchange(u)
    cart.Free()
    inner = (u[:-2] + 2 * u[1:-1] + u[2:]) / 4
    return np.pad(inner, 1)


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


comm = MPI.COMM_WORLD
u = np.zeros(18)
u[1:-1] = comm.rank
before = 0
for call in range(CALLS):
    u = smooth(comm, u)
    if call == CALLS // 10:
        before = open_files()

total = comm.allreduce(float(u[1:-1].sum()))
wrong = abs(total - 16 * sum(range(comm.size))) > 1e-9
if wrong or open_files() > before:
    raise SystemExit(f"rank {comm.rank}: WRONG: {total}, {open_files()} files, were {before}")
if comm.rank == 0:
    print(f"{CALLS} plans were made and dropped, {before} files are open: right")

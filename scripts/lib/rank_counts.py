"""Times and memory of a node, by the number of ranks, beside what MPI itself takes.

    for n in 2 4 8 28 64 128; do mpirun -n $n python -m mpi4py scripts/lib/rank_counts.py FILE; done

Without GPUs. FILE gets a line of JSON more: milliseconds of making a node, a window and a plan, and
of closing them; microseconds of a fence, an exchange and a maximum of 8 B; and MiB of private
memory per rank, and of /dev/shm for all ranks, where nothing else uses it. Times are the median of
several rounds, each the maximum over all ranks.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpishare

ROUNDS = 5


def private_mib():
    """Return the memory that this process shares with no other, in MiB."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    sizes = {name: int(size.split()[0]) for name, size in (line.split(":") for line in lines)}
    return (sizes["Private_Clean"] + sizes["Private_Dirty"]) / 1024


def shared_mib():
    """Return the memory that all files in /dev/shm take, in MiB."""
    space = os.statvfs("/dev/shm")
    return (space.f_blocks - space.f_bfree) * space.f_frsize / (1 << 20)


class Stopwatch:
    """Collects the seconds of tasks, each begun by all ranks at once."""

    def __init__(self, comm):
        self.comm = comm
        self.seconds = {}

    def __call__(self, task, function, calls=1):
        self.comm.Barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            made = function()
        mine = (time.perf_counter() - begin) / calls
        self.seconds.setdefault(task, []).append(self.comm.allreduce(mine, MPI.MAX))
        return made

    def medians(self, unit_s):
        return {
            task: round(statistics.median(all_) / unit_s, 3) for task, all_ in self.seconds.items()
        }


def of_mpishare(cart, once, often, calls):
    """Measure a node in all its life, and return its private and its shared MiB."""
    cart.Barrier()
    before = private_mib(), shared_mib()
    cart.Barrier()
    node = once("node", mpishare.Node)
    window = once("window", lambda: node.allocate(8))
    rank, largest = float(cart.rank), np.full(1, float(cart.rank))
    u = np.full(6, rank)
    halo = once("plan", lambda: mpishare.HaloExchange(cart, u, width=1, node=node))
    maximum = mpishare.Allreduce(cart, largest, op="max", node=node)
    mib = private_mib() - before[0], shared_mib() - before[1]
    for _ in range(ROUNDS):
        often("fence", window.fence, calls)
        often("exchange", lambda: halo.exchange(u), calls)
        often("maximum", lambda: maximum.reduce(largest), calls)
    if largest[0] != cart.size - 1 or u[0] != (rank - 1) % cart.size:
        raise SystemExit(f"WRONG: {largest}, {u}")
    once("close", node.close)
    return mib


def of_mpi(cart, once, often, calls):
    """Measure the calls of MPI that do the same."""
    split = once("MPI_Comm_split_type", lambda: cart.Split_type(MPI.COMM_TYPE_SHARED))
    window = once("MPI_Win_allocate_shared", lambda: MPI.Win.Allocate_shared(64, 8, comm=split))
    (left, right), mine, ghost = cart.Shift(0, 1), np.ones(1), np.zeros(1)
    for _ in range(ROUNDS):
        often("MPI_Barrier", cart.Barrier, calls)
        often("MPI_Sendrecv", lambda: cart.Sendrecv(mine, right, 0, ghost, left), calls)
        often("MPI_Allreduce", lambda: cart.Allreduce(mine, ghost, MPI.MAX), calls)
    window.Free()
    split.Free()


def main(file):
    cart = MPI.COMM_WORLD.Create_cart([MPI.COMM_WORLD.size], periods=[True])
    once, often = Stopwatch(cart), Stopwatch(cart)
    cores = len(os.sched_getaffinity(0))
    calls = 20 if cart.size <= cores else 1  # ranks in turns take milliseconds
    mib = []
    for _ in range(ROUNDS):
        mib.append(of_mpishare(cart, once, often, calls))
        of_mpi(cart, once, often, calls)
    private, shared = (cart.reduce(max(each), MPI.MAX) for each in zip(*mib, strict=True))
    if cart.rank == 0:
        row = {"ranks": cart.size, "cores": cores}
        row |= {"private_mib": round(private, 2), "shared_mib": round(shared, 2)}
        row |= {"ms": once.medians(1e-3), "us": often.medians(1e-6)}
        with Path(file).open("a") as lines:
            print(json.dumps(row), file=lines)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Patches of an adaptive mesh go to worker processes without MPI: `mpishare.open_handle`.

    mpirun -n 1 python -m mpi4py scripts/examples/31_open_handle.py

What travels is a handle of some hundred bytes. `python scripts/examples/31_open_handle.py` does the
same: a node of one process needs no mpirun.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import numpy as np

import mpishare

PATCHES = 12


def refine(handle):
    """Run in a worker: smooth the patch in place, in the memory of the simulation."""
    patch = mpishare.open_handle(handle)
    patch[1:-1] = (patch[:-2] + patch[2:]) / 2
    return float(patch.sum())  # on a GPU this waits; the block goes back when `patch` is dropped


def main():
    """Run as rank 0 of a job of any size."""
    context = multiprocessing.get_context("spawn")  # a fork would have no GPU
    with mpishare.Node() as node:
        pool = node.pool()
        if node.is_leader:
            sizes = np.random.default_rng(3).integers(10, 5000, PATCHES)
            patches = [pool.allocate(int(size)) for size in sizes]
            for patch in patches:
                patch[...] = node.xp.arange(patch.size)
            node.synchronize()  # written, before anybody hears of them
            with ProcessPoolExecutor(2, context) as workers, mpishare.outside_environment():
                sums = list(workers.map(refine, [pool.handle(patch) for patch in patches]))
            right = [size * (size - 1) / 2 for size in sizes.tolist()]
            if sums != right or sums != [float(patch.sum()) for patch in patches]:
                raise SystemExit(f"WRONG: {sums}")
            print(f"{PATCHES} patches, smoothed in place by 2 workers: right")
        node.barrier()


if __name__ == "__main__":
    main()

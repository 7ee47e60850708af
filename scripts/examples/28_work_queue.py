"""A work queue in the memory of one GPU: kernels of all ranks take tasks until none is left.

    mpirun -n 4 python -m mpi4py scripts/examples/28_work_queue.py

Tasks take unequal times, and the host of no rank says who does which.
"""

import numpy as np

import mpishare

CODE = r"""
#include <mpishare.cuh>
using namespace mpishare;

// Task i: the number of steps of the Collatz sequence from i + 1.
extern "C" __global__ void work(Device d, unsigned ntasks, unsigned* taken) {
    unsigned* next = at<unsigned>(d, 0);
    unsigned* results = at<unsigned>(d, 0, 1);
    for (unsigned i; (i = atomicAdd_system(next, 1u)) < ntasks;) {
        unsigned steps = 0;
        for (unsigned long long x = i + 1; x != 1; ++steps) x = x % 2 ? 3 * x + 1 : x / 2;
        results[i] = steps;
        atomicAdd(taken, 1u);
    }
    barrier<block>(d, blockIdx.x); // then all results are there
}
"""
BLOCKS, THREADS, NTASKS = 4, 64, 30_000


def steps_from(x):
    count = 0
    while x != 1:
        x, count = (3 * x + 1 if x % 2 else x // 2), count + 1
    return count


with mpishare.Node() as node:
    window = node.allocate_each(1 + NTASKS if node.rank == 0 else 0, "u4", fill=0, signals=BLOCKS)
    device = window.device  # refused on the host, which has no kernels

    import cupy

    work = cupy.RawModule(code=CODE, options=mpishare.device.include()).get_function("work")
    taken = cupy.zeros(1, "u4")
    node.launch(work, (BLOCKS,), (THREADS,), (device, np.uint32(NTASKS), taken))
    node.synchronize()

    shares = node.comm.allgather(int(taken[0]))
    if node.rank == 0:
        found = window.array[1:].get()
        wrong = [i for i in range(0, NTASKS, 7) if found[i] != steps_from(i + 1)]
        if wrong or sum(shares) != NTASKS:
            raise SystemExit(f"WRONG: tasks {wrong[:5]}, taken {shares}")
        print(f"tasks by rank {shares}, right")
    node.barrier()

"""A histogram whose bins are spread over the ranks: atomics on the memory of all GPUs.

    mpirun -n 4 python -m mpi4py scripts/examples/27_histogram.py

`at` returns a pointer, and atomics of system scope work on it. Between GPUs they need NVLink.
"""

import numpy as np

import mpishare

CODE = r"""
#include <mpishare.cuh>
using namespace mpishare;

extern "C" __global__ void count(Device d, const unsigned* keys, int n, int per_rank) {
    const int first = blockIdx.x * blockDim.x + threadIdx.x;
    for (int i = first; i < n; i += gridDim.x * blockDim.x)
        atomicAdd_system(at<unsigned>(d, keys[i] / per_rank, keys[i] % per_rank), 1u);
    barrier<block>(d, blockIdx.x); // each block with its own slot; then all bins are complete
}
"""
BLOCKS, THREADS, PER_RANK, N = 8, 256, 100, 50_000

with mpishare.Node() as node:
    window = node.allocate_each(PER_RANK, "u4", fill=0, signals=BLOCKS)
    device = window.device  # refused on the host, which has no kernels

    import cupy

    count = cupy.RawModule(code=CODE, options=mpishare.device.include()).get_function("count")
    keys = np.random.default_rng(node.rank).integers(0, PER_RANK * node.size, N, dtype="u4")
    arguments = device, cupy.asarray(keys), np.int32(N), np.int32(PER_RANK)
    node.launch(count, (BLOCKS,), (THREADS,), arguments)
    node.synchronize()

    everything = np.concatenate(node.comm.allgather(keys))
    right = np.bincount(everything, minlength=PER_RANK * node.size)
    mine = right[PER_RANK * node.rank :][:PER_RANK]
    if not (window.array.get() == mine).all():
        raise SystemExit(f"rank {node.rank}: WRONG: {window.array} instead of {mine}")
    node.barrier()
    if node.rank == 0:
        print(f"{len(everything)} keys in {len(right)} bins, right")

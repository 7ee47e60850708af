"""Diffusion on a ring in one kernel of many steps, which exchanges its own halo.

    mpirun -n 4 python -m mpi4py scripts/examples/29_device_stencil.py

No step returns to the host. Two buffers in turn: a neighbor that has sent step k + 1 has read k.
"""

import numpy as np

import mpishare

CODE = r"""
#include <mpishare.cuh>
using namespace mpishare;
enum Slot { TO_LEFT, TO_RIGHT };

extern "C" __global__ void diffuse(Device d, int n, int steps) {
    const int right = (d.rank + 1) % d.size, left = (d.rank + d.size - 1) % d.size;
    const Word before = (epoch(d, 0) - 1) * steps;
    for (int k = 1; k <= steps; ++k) {
        const int there = k % 2 * (n + 2); // where the new cells begin, the same on all ranks
        double* now = at<double>(d, d.rank, there);
        const double* old = at<double>(d, d.rank, n + 2 - there);
        for (int i = 1 + threadIdx.x; i <= n; i += blockDim.x)
            now[i] = old[i] + 0.25 * (old[i - 1] - 2 * old[i] + old[i + 1]);
        __syncthreads();
        if (threadIdx.x == 0)
            put_signal<thread>(d, left, there + n + 1, now + 1, 1, TO_LEFT, before + k);
        if (threadIdx.x == 32)
            put_signal<thread>(d, right, there, now + n, 1, TO_RIGHT, before + k);
        if (!wait<block>(d, right, TO_LEFT, before + k)) return;
        if (!wait<block>(d, left, TO_RIGHT, before + k)) return;
    }
}
"""
N, STEPS = 500, 200  # an even number: a launch begins in the first buffer

with mpishare.Node() as node:
    window = node.allocate_each((2, N + 2), fill=0.0, signals=2)
    device = window.device  # refused on the host, which has no kernels

    import cupy

    diffuse = cupy.RawModule(code=CODE, options=mpishare.device.include()).get_function("diffuse")
    whole = np.random.default_rng(1).random(N * node.size)
    places = np.arange(N * node.rank - 1, N * node.rank + N + 1) % len(whole)
    window.array[0] = cupy.asarray(whole[places])
    window.fence()
    for _ in range(3):
        node.launch(diffuse, (1,), (256,), (device, np.int32(N), np.int32(STEPS)))
    node.synchronize()

    for _ in range(3 * STEPS):
        whole = whole + 0.25 * (np.roll(whole, 1) - 2 * whole + np.roll(whole, -1))
    if not np.allclose(window.array[0].get(), whole[places], rtol=0, atol=1e-12):
        raise SystemExit(f"rank {node.rank}: WRONG: {window.array[0]}")
    node.barrier()
    if node.rank == 0:
        print(f"{3 * STEPS} steps in 3 launches, right")

"""A sum over all ranks inside one kernel: arrays go round a ring by puts with signals.

    mpirun -n 4 python -m mpi4py scripts/examples/26_device_ring.py

The kernel is launched, then replayed by a graph: `epoch` counts both, so that signals only grow.
"""

import mpishare

CODE = r"""
#include <mpishare.cuh>
using namespace mpishare;
enum Slot { SENT, READ };

extern "C" __global__ void ring(Device d, double* travels, double* total, int n) {
    const int right = (d.rank + 1) % d.size, left = (d.rank + d.size - 1) % d.size;
    const Word before = (epoch(d, 0) - 1) * (d.size - 1);
    for (int i = threadIdx.x; i < n; i += blockDim.x) travels[i] = total[i];
    __syncthreads();
    for (int k = 1; k < d.size; ++k) {
        if (!wait<block>(d, right, READ, before + k - 1)) return; // what I sent there last
        put_signal<block>(d, right, 0, travels, n, SENT, before + k);
        if (!wait<block>(d, left, SENT, before + k)) return;
        for (int i = threadIdx.x; i < n; i += blockDim.x)
            total[i] += travels[i] = *at<double>(d, d.rank, i);
        __syncthreads();
        if (threadIdx.x == 0) signal(d, left, READ, before + k);
    }
}
"""
N = 1000

with mpishare.Node() as node:
    window = node.allocate_each(N, signals=2)
    device = window.device  # refused on the host, which has no kernels

    import cupy

    ring = cupy.RawModule(code=CODE, options=mpishare.device.include()).get_function("ring")
    travels, total = cupy.empty(N), cupy.arange(N) + 1000.0 * node.rank
    arguments = device, travels, total, cupy.int32(N)
    stream = cupy.cuda.Stream(non_blocking=True)
    node.synchronize()
    with stream:
        node.launch(ring, (1,), (256,), arguments)
        stream.begin_capture()
        node.launch(ring, (1,), (256,), arguments)
        graph = stream.end_capture()
        graph.launch()
        node.synchronize()

    right = node.size * (node.size * cupy.arange(N) + 500.0 * node.size * (node.size - 1))
    if not (total == right).all():
        raise SystemExit(f"rank {node.rank}: WRONG: {total} instead of {right}")
    node.barrier()
    if node.rank == 0:
        print("summed twice, right")

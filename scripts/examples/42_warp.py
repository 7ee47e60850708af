"""A kernel of Warp that puts its numbers into the next rank's memory, signals and waits.

    mpirun -n 4 python -m mpi4py scripts/examples/42_warp.py

Warp compiles the header with its own code; a line of C++ makes one of its functions.
"""

import mpishare

N, BLOCK, LAUNCHES, SENT, READ = 1000, 256, 5, 0, 1

with mpishare.Node() as node:
    window = node.allocate_each(N, signals=2)
    device = int(window.device["self"])  # refused on the host, which has no kernels
    import cupy
    import warp
    from warp import float64, int32, int64, uint64

    warp.config.log_level = warp.LOG_WARNING  # else it prints what it compiles
    (folder, checksum) = mpishare.device.include()
    build = warp.ModuleBuildOptions(
        extra_cuda_include_dirs=[folder.removeprefix("-I")],
        extra_cuda_preamble=f"// {checksum}\n#include <mpishare.cuh>\nnamespace m = mpishare;\n"
        "#define D (*reinterpret_cast<const m::Device*>(d))",
    )
    warp.set_module_options({"extra_build_options": build, "enable_backward": False})

    @warp.func_native("return (D.rank + D.size + steps) % D.size;")
    def neighbor(d: uint64, steps: int32) -> int32: ...
    @warp.func_native("return m::epoch(D, 0);")
    def epoch(d: uint64) -> int64: ...
    @warp.func_native("m::put_signal<m::block>(D, to, 0, a.data, n, slot, k);")
    def put(d: uint64, to: int32, a: warp.array[float64], n: int32, slot: int32, k: int64): ...
    @warp.func_native("return m::wait<m::block>(D, peer, slot, k);")
    def wait(d: uint64, peer: int32, slot: int32, k: int64) -> warp.bool: ...
    @warp.func_native("__syncthreads(); if (threadIdx.x == 0) m::signal(D, to, slot, k);")
    def signal(d: uint64, to: int32, slot: int32, k: int64): ...
    @warp.kernel
    def shift(d: uint64, a: warp.array[float64], b: warp.array[float64], s: warp.array[float64]):
        right, left, k = neighbor(d, 1), neighbor(d, -1), epoch(d)
        if wait(d, right, READ, k - int64(1)):  # it has read what I sent last
            put(d, right, a, N, SENT, k)
            if wait(d, left, SENT, k):
                for i in range(warp.tid(), N, BLOCK):
                    s[i] += b[i]
                signal(d, left, READ, k)

    gpu, stream = f"cuda:{cupy.cuda.Device().id}", cupy.cuda.get_current_stream()
    source, total = cupy.arange(N) + 1000.0 * node.rank, cupy.zeros(N)
    warp.load_module(device=gpu, block_dim=BLOCK)
    node.barrier()  # all ranks have compiled and loaded it
    for _ in range(LAUNCHES):
        arguments = device, source, window.array, total
        warp.launch(shift, BLOCK, arguments, stream=warp.Stream(gpu, cuda_stream=stream.ptr))
    node.synchronize()
    if not (total == LAUNCHES * (cupy.arange(N) + 1000.0 * ((node.rank - 1) % node.size))).all():
        raise SystemExit(f"rank {node.rank}: WRONG: {total}")
    node.barrier()
    if node.rank == 0:
        print(f"{LAUNCHES} launches, right")

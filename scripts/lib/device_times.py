"""Times of puts and signals inside kernels, beside the same by calls of the host.

    mpirun -n 2 python scripts/lib/device_times.py

Ranks 0 and 1 play. Each figure is the least and the median of 20 launches, in us.
"""

from functools import partial
from pathlib import Path

import cupy
import numpy as np
from mpi4py import MPI

import mpishare

CODE = Path(__file__).parents[2] / "tests" / "device" / "kernels.cu"
ROUNDS, LAUNCHES = 1000, 20


def times(node, launch):
    """The microseconds of each launch on rank 0, after three that do not count."""
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    found = []
    for _ in range(3 + LAUNCHES):
        node.synchronize()
        node.barrier()
        begin.record()
        launch()
        end.record()
        node.synchronize()
        found.append(1000 * cupy.cuda.get_elapsed_time(begin, end))
    return np.array(found[3:])


def main():
    module = cupy.RawModule(
        code=CODE.read_text(), options=("--std=c++17", *mpishare.device.include())
    )
    with mpishare.Node(MPI.COMM_WORLD, backend="cuda") as node:

        def tell(what, found, count=1):
            if node.rank == 0:
                found = found / count
                print(f"{what:58} {found.min():9.2f} {np.median(found):9.2f}", flush=True)

        def check(failed):
            if node.rank < 2:
                assert int(failed[0]) == 0

        for name in ("ping", "ping_word"):
            with node.allocate_each(16, signals=4) as window:
                failed, kernel = cupy.ones(1, "i4"), module.get_function(name)
                args = window.device, np.int64(ROUNDS), failed
                found = times(node, partial(node.launch, kernel, (1,), (1,), args))
                check(failed)
                text = "8 B put_signal" if name == "ping" else "4 B put_word"
                tell(f"{text}, there and back in one kernel", found, ROUNDS)

        kernel = module.get_function("swap")
        for nbytes in (64 << 10, 1 << 20, 16 << 20):
            count = nbytes // 8
            for blocks in (1, 4, 16, 32, 64):
                with node.allocate_each(count, signals=1 + blocks) as window:
                    failed, source = cupy.ones(1, "i4"), cupy.ones(count)
                    args = window.device, source, np.int64(count), failed
                    step = cupy.cuda.Stream(non_blocking=True)
                    node.launch(kernel, (blocks,), (512,), args)
                    node.synchronize()
                    step.begin_capture()
                    for _ in range(20):
                        node.launch(kernel, (blocks,), (512,), args, step)
                    graph = step.end_capture()
                    found = times(node, graph.launch)
                    check(failed)
                    best = 20 * nbytes / found.min() / 1e3
                    text = f"{nbytes >> 10} KiB swapped, {blocks} blocks, twenty in a graph"
                    tell(f"{text} ({best:.0f} GB/s)", found, 20)

        with node.allocate_each(1, fill=0.0) as window:
            peers = [rank ^ 1 for rank in [node.rank] if rank ^ 1 < node.size and rank < 2]

            def by_host():
                for _ in range(20):
                    window.post(peers)
                    window.start(peers)
                    window.complete()
                    window.wait()

            tell("post, start, complete, wait by the host", times(node, by_host), 20)


main()

"""Wait for another process's slow kernel: by an event, on the stream, while the host goes on.

    mpirun -n 4 python -m mpi4py scripts/examples/12_slow_kernel.py

An event of mpishare cannot pass early: `wait` waits for the record that belongs to it.
"""

import math
import time

import mpishare

N, ROUNDS = 1 << 20, 40


def slow(x):
    """Many kernels, one after the other."""
    for _ in range(ROUNDS):
        x[...] = node.xp.cos(x)


with mpishare.Node() as node:
    window = node.allocate(N, fill=1.0)
    done = node.event(owner=node.leader)  # the others wait for it
    slow(window.array[:1] if node.is_leader else node.xp.ones(1))  # load the kernels
    node.synchronize()
    window.fence()

    begin = time.perf_counter()
    if node.is_leader:
        slow(window.array)
        done.record()  # after the slow work on my stream
    else:
        done.wait()  # my stream waits; on CUDA the host is here at once
    called_ms = 1e3 * (time.perf_counter() - begin)
    biggest = window.array[1:].max()  # after the event, on every rank
    node.synchronize()
    took_ms = 1e3 * (time.perf_counter() - begin)

    right = 1.0
    for _ in range(ROUNDS):
        right = math.cos(right)
    if abs(float(biggest) - right) > 1e-12:
        raise SystemExit(f"rank {node.rank}: WRONG: {biggest} instead of {right}")
    times = node.comm.gather(f"rank {node.rank}: {called_ms:.1f} ms to call, {took_ms:.1f} ms")
    if times:
        print(*times, "right", sep="\n")

#!/usr/bin/env python3
"""What a viewer costs: time to attach, and what snapshots add to the steps of a job.

    mpirun -n 2 python scripts/lib/snapshots.py [--backend host] [--edge 256] [--seconds 2]

A step multiplies a cube of float64 some times; snapshots are taken 30 times a second. Runs with
and without them take turns; the median of the differences is printed, in percent of a step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from mpi4py import MPI  # noqa: E402

import mpishare  # noqa: E402

VIEWER = """
import json, sys, time
begin = time.perf_counter()
import mpishare
imported = time.perf_counter()
first = mpishare.attach("cube")
with_context = time.perf_counter()
times = []
for _ in range(20):
    start = time.perf_counter()
    there = mpishare.attach("cube")
    times.append(time.perf_counter() - start)
    there.close()
told = {"import_ms": imported - begin, "first_attach_ms": with_context - imported,
        "attach_ms": sorted(times)[10]}
print(json.dumps({k: round(1e3 * v, 2) for k, v in told.items()}), flush=True)
count = 0
for frame in first:
    count += 1
print(count, flush=True)
"""


def steps(node, window, seconds, passes, rate):
    """Run for some seconds; return the seconds per step, the slowest rank's, and the snapshots."""
    node.synchronize()
    node.barrier()
    begin = last = time.perf_counter()
    count = taken = 0
    while time.perf_counter() - begin < seconds:
        for _ in range(passes):
            window.array *= 1.0000001
        count += 1
        if rate and time.perf_counter() - last >= 1 / rate:
            last = time.perf_counter()
            window.snapshot()
            taken += 1
        node.synchronize()
    mine = (time.perf_counter() - begin) / count
    return node.comm.allreduce(mine, MPI.MAX), taken


def cost(node, window, options):
    """The median over turns of what snapshots add, in percent, and the snapshots of a turn."""
    changes, snapshots = [], 0
    for _ in range(options.turns):
        without, _ = steps(node, window, options.seconds, options.passes, 0)
        with_them, snapshots = steps(node, window, options.seconds, options.passes, 30)
        changes.append(100 * (with_them / without - 1))
    return f"{statistics.median(changes):+.2f} % of a step of {1e3 * without:.2f} ms " + (
        f"(from {min(changes):+.2f} to {max(changes):+.2f}; {snapshots} snapshots in "
        f"{options.seconds:g} s)"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--edge", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--passes", type=int, default=100)
    options = parser.parse_args()
    with mpishare.Node(backend=options.backend) as node:
        window = node.allocate_each([options.edge] * 3, fill=1.0, name="cube")
        window.snapshot()
        steps(node, window, 0.5, options.passes, 30)
        say = print if node.rank == 0 else (lambda *_: None)
        say(f"{node.size} ranks, backend {node.backend}, {options.edge}^3 float64 per rank")
        say("no viewer:", cost(node, window, options))
        ways = [("viewer", {})]
        if node.backend == "cuda":
            ways.append(("viewer without a GPU", {"CUDA_VISIBLE_DEVICES": ""}))
        for name, env in ways:
            viewer = None
            if node.rank == 0:
                viewer = subprocess.Popen(
                    [sys.executable, "-c", VIEWER],
                    env={**os.environ, "PYTHONPATH": str(ROOT), **env},
                    stdout=subprocess.PIPE,
                    text=True,
                )
                say(f"{name}: {json.loads(viewer.stdout.readline())}")
            node.barrier()
            say(f"{name}:", cost(node, window, options))
            if viewer:
                viewer.kill()
                viewer.wait()
            node.barrier()
        window.close()


if __name__ == "__main__":
    main()

"""What messages cost neighbors on the same node: plans that mix routes, on two pretended nodes.

    scripts/with-mps mpirun -n 4 python scripts/lib/mixed_nodes.py [FILE]

Four ranks in two halves that take each other for another machine, on a GPU per half: along one axis
of the grid faces travel by kernels, along the other by MPI. FILE gets a line of JSON per size.
Microseconds, medians of the maximum over the ranks.
"""

import json
import sys
import time
import warnings
from pathlib import Path
from unittest import mock

import cupy
import numpy as np
from mpi4py import MPI

import mpishare
from mpishare.reduction.cuda import transfer
from mpishare.runtime import places

FACES = (8, 4 << 10, 64 << 10, 1 << 20, 16 << 20)
SUMS = (8, 1 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20)
SAMPLES, IN_A_ROW, ROWS = 30, 30, 5
IDLE = cupy.RawKernel(
    r"""extern "C" __global__ void idle(long long ns) {
        unsigned long long first, now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(first));
        do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - first < ns);
    }""",
    "idle",
)
WORLD = MPI.COMM_WORLD


def synchronize():
    cupy.cuda.get_current_stream().synchronize()


def line_up():
    synchronize()
    WORLD.Barrier()


def slowest(samples_s):
    """The median of the maximum over the ranks, in microseconds."""
    return round(float(np.median(np.max(WORLD.allgather(samples_s), axis=0))) * 1e6, 1)


def timed(step, calls=1, samples=SAMPLES):
    """A step of so many calls back to back, with a synchronize after them."""
    samples_s = []
    for _ in range(samples):
        line_up()
        begin = time.perf_counter()
        for _ in range(calls):
            step()
        synchronize()
        samples_s.append((time.perf_counter() - begin) / calls)
    return slowest(samples_s)


def kernel_part(halo, u):
    """From `start` until the fused kernel has ended, on the GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        own = cupy.cuda.ExternalStream(halo._forward._stream)
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    samples_s = []
    for _ in range(SAMPLES):
        line_up()
        begin.record()
        halo.start(u)
        end.record(own)
        halo.wait()
        synchronize()
        samples_s.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
    return slowest(samples_s)


def exchanges(cart, node, nbytes):
    """Axis 0 is cut between the nodes, axis 1 in them."""
    depth = max(nbytes // 16, 1)
    # Without ghosts along the axis that a plan does not exchange: faces of the same bytes.
    shapes = {
        "fused": ((2, 4, depth), ((0, 0), (1, 1))),
        "messages": ((4, 2, depth), ((1, 1), (0, 0))),
        "mixed": ((4, 4, depth), 1),
    }
    fields = {name: cupy.zeros(shape) for name, (shape, _) in shapes.items()}
    plans = {
        name: mpishare.HaloExchange(cart, fields[name], width, node=node, axes=(0, 1))
        for name, (_, width) in shapes.items()
    }
    u = fields["mixed"]
    found = {"face_nbytes": u[1:2, 1:3].nbytes, "routes": sorted(plans["mixed"].routes.values())}
    for name, halo in plans.items():

        def step(halo=halo, field=fields[name]):
            halo.exchange(field)

        for _ in range(3):
            step()
        found[name] = [timed(step), timed(step, IN_A_ROW, ROWS)]
    found["fused part alone"] = kernel_part(plans["fused"], fields["fused"])
    found["fused part of mixed"] = kernel_part(plans["mixed"], u)
    work_ns = int(1500 * found["mixed"][0])

    def compute():
        IDLE((1,), (1,), (work_ns,))

    def overlapped():
        plans["mixed"].start(u)
        compute()
        plans["mixed"].wait()

    found["interior"], found["interior beside mixed"] = timed(compute), timed(overlapped)
    for halo in plans.values():
        halo.close()
    return found


def sums(node, nbytes):
    """Packed on the GPUs, through the host, and staged by hand."""
    x = cupy.ones(nbytes // 8)
    found = {"sum_nbytes": x.nbytes}
    for name, least in (("on GPUs", 1), ("through the host", 1 << 60)):
        with (
            mock.patch.object(transfer, "MIN_ON_GPU_NBYTES", least),
            mpishare.Allreduce(WORLD, x, node=node) as total,
        ):

            def step(total=total):
                total.reduce(x)

            step()
            found[name] = timed(step)
    pinned = np.frombuffer(cupy.cuda.alloc_pinned_memory(x.nbytes), float, x.size)
    result = np.empty(x.size)

    def by_hand():
        x.get(out=pinned)
        WORLD.Allreduce(pinned, result)
        x.set(result)

    found["staged by hand"] = timed(by_hand)
    return found


def main():
    half = 2 * WORLD.rank // WORLD.size
    device = half % cupy.cuda.runtime.getDeviceCount()
    with mock.patch.object(places, "place", return_value=[*places.place(), half]):
        node = mpishare.Node(device=device, timeout_s=30)
    IDLE((1,), (1,), (1,))
    cart = WORLD.Create_cart([2, WORLD.size // 2], [True, True])
    works = [(exchanges, cart, node, nbytes) for nbytes in FACES]
    works += [(sums, node, nbytes) for nbytes in SUMS]
    lines = []
    for function, *arguments in works:
        lines.append(json.dumps(function(*arguments)))
        if WORLD.rank == 0:
            print(lines[-1], flush=True)
    if WORLD.rank == 0 and len(sys.argv) > 1:
        Path(sys.argv[1]).write_text("".join(f"{line}\n" for line in lines))
    node.close()


if __name__ == "__main__":
    main()

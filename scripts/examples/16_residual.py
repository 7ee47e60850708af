"""Stop when the residual is small: the norm over all ranks by `Allreduce.dot`, on the device.

    mpirun -n 4 python -m mpi4py scripts/examples/16_residual.py

Jacobi's iteration for (2 + SHIFT) u[i] - u[i - 1] - u[i + 1] = f[i] on a ring. All ranks get the
same bits of the norm, and so stop at the same step.
"""

import math

from mpi4py import MPI

import mpishare

CELLS, SHIFT, SMALL, EVERY = 64, 0.5, 1e-20, 10  # owned cells per rank; look at every tenth norm

with mpishare.Node() as node:
    xp, world = node.xp, MPI.COMM_WORLD
    u = xp.zeros(CELLS + 2)
    halo = mpishare.HaloExchange(world, u, 1, dims=(world.size,), periods=True, node=node)
    total = mpishare.Allreduce(world, mpishare.Layout(1), node=node)

    wave = 2 * math.pi / (CELLS * world.size)
    mode = xp.cos(wave * (CELLS * world.rank + xp.arange(CELLS)))
    f = (2 + SHIFT - 2 * math.cos(wave)) * mode  # so that u = mode is the solution
    residual, norm = xp.empty(CELLS), xp.empty(1)
    steps = 0
    while True:
        halo.exchange(u)
        xp.add(u[:-2], u[2:], out=residual)
        residual -= (2 + SHIFT) * u[1:-1]
        residual += f
        total.dot(residual, residual, out=norm)  # the sum over all ranks
        u[1:-1] += residual / (2 + SHIFT)
        steps += 1
        # Only this waits for the GPU.
        if steps % EVERY == 0 and float(norm[0]) < SMALL:
            break

    error = xp.abs(u[1:-1] - mode).max().reshape(1)
    with mpishare.Allreduce(world, error, "max", node=node) as largest:
        largest.reduce(error)
    if world.allreduce(steps, MPI.MAX) != steps or float(error[0]) > 1e-9:
        raise SystemExit(f"WRONG: {steps} steps, off by {float(error[0])}")
    if world.rank == 0:
        print(f"{world.size} ranks, {steps} steps, error {float(error[0]):.0e}: right")

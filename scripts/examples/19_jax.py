"""A solver in JAX: exchanges inside `jax.jit`, and a gradient through all of its steps.

    mpirun -n 2 python -m mpi4py scripts/examples/19_jax.py

Heat spreads on a ring of cells. Where was it at the start, if the end is known? Descent finds it:
the gradient of a step takes the reverse of the exchange, which mpishare does.
"""

import os

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # ranks may share a GPU

import jax
import jax.numpy as jnp
from mpi4py import MPI

import mpishare
import mpishare.jax

N, STEPS, RATE = 64, 40, 0.2
SIZE = MPI.COMM_WORLD.size

with mpishare.Node() as node:
    # One GPU per rank, and the same as the node's.
    if node.device:
        jax.config.update("jax_default_device", jax.devices()[node.device.ordinal])
    else:
        jax.config.update("jax_platforms", "cpu")
    like = mpishare.Layout(N + 2, "f4")
    halo = mpishare.HaloExchange(node.comm, like, 1, dims=(SIZE,), periods=True, node=node)

    def step(u, _):
        u = mpishare.jax.exchange(halo, u)
        return u.at[1:-1].add(RATE * (u[:-2] - 2 * u[1:-1] + u[2:])), None

    def spread(u):
        return jax.lax.scan(step, u, None, length=STEPS)[0]

    @jax.jit
    def misfit(start, end):
        return jnp.sum((spread(start) - end)[1:-1] ** 2)

    wanted = jnp.zeros(N + 2).at[N // 2].set(1.0 + node.rank)
    end = jax.jit(spread)(wanted)
    slope = jax.jit(jax.grad(misfit))
    start = jnp.zeros(N + 2)
    for _ in range(60):
        start -= 0.5 * slope(start, end)
    error = float(misfit(start, end)) / float(misfit(jnp.zeros(N + 2), end))
    worst = node.comm.allreduce(error, MPI.MAX)
    halo.close()
    if worst > 1e-2:
        raise SystemExit(f"WRONG: a misfit of {worst} is left")
    if node.is_leader:
        print(f"{SIZE} ranks, {100 * worst:.2f} % of the misfit left after 60 descents: right")

"""Checks of `mpishare.jax` on every rank.

    mpirun -n 2 python -m tests.examples.jax_program MESSAGES NAMES

MESSAGES are `mpi` or `nccl` between two halves of the ranks, else empty.

A process of its own, since JAX starts threads that forbid forks, and one per GPU.
"""

import os
import re
import sys
from contextlib import contextmanager

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # ranks may share a GPU
# The same to NCCL: a host of its own for each, by sockets.
os.environ |= {"NCCL_HOSTID": f"host{os.getpid()}", "NCCL_SOCKET_IFNAME": "lo"}

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from mpi4py import MPI

import mpishare
import mpishare.jax
from mpishare.backends import nccl
from tests.examples import jax_sums
from tests.helpers.halves import device_of_half, node_of_half

WORLD = MPI.COMM_WORLD
CELLS, COLUMNS = 6, 5


@contextmanager
def local_node(messages):
    """A node on JAX's own GPU, or on the host where it has none.

    With messages it is that of one half of the ranks, and they go to the other half.
    """
    if messages == "mpi":
        nccl.load = no_nccl
    on_host = os.environ.get("MPISHARE_BACKEND") == "host"
    where = (None, "host") if on_host else (device_of_half(),) if messages else ()
    with node_of_half(*where) if messages else mpishare.Node(WORLD) as node:
        jax.config.update("jax_enable_x64", True)
        if node.backend == "cuda":
            jax.config.update("jax_default_device", jax.devices()[node.device.ordinal])
        else:
            jax.config.update("jax_platforms", "cpu")
        yield node


def no_nccl():
    raise mpishare.UnsupportedError("no NCCL here")


def setup(node, comm=WORLD, periods=True, dtype="f8"):
    like = mpishare.Layout((CELLS + 2, COLUMNS), dtype)
    halo = mpishare.HaloExchange(
        comm, like, 1, axes=(0,), dims=(comm.size,), periods=periods, node=node
    )
    whole = np.random.default_rng(5).normal(size=(CELLS * comm.size, COLUMNS)).astype(dtype)
    first = CELLS * comm.rank
    here = slice(first, first + CELLS)
    return halo, whole, here, jnp.pad(jnp.asarray(whole[here]), ((1, 1), (0, 0)))


def stencil(u):
    return u.at[1:-1].set((u[:-2] + u[2:]) * 0.5)


def is_padded(node):
    """What arrives is what `jnp.pad` makes of the whole."""
    halo, whole, here, u = setup(node)
    right = jnp.pad(jnp.asarray(whole), ((1, 1), (0, 0)), mode="wrap")
    right = right[here.start : here.stop + 2]
    for call in (lambda v: mpishare.jax.exchange(halo, v), None):
        found = call(u) if call else jax.jit(lambda v: mpishare.jax.exchange(halo, v))(u)
        np.testing.assert_array_equal(found, right)
    assert not np.asarray(u)[0].any(), "the argument itself was written"


def steps_in_a_loop(node):
    """A hundred steps in one program, by `fori_loop` and by `scan`, alone and unrolled."""
    halo, whole, here, u = setup(node)

    def step(v):
        return stencil(mpishare.jax.exchange(halo, v))

    for _ in range(100):
        whole = (np.roll(whole, 1, 0) + np.roll(whole, -1, 0)) * 0.5
    loops = (
        lambda v: jax.lax.fori_loop(0, 100, lambda _, w: step(w), v),
        lambda v: jax.lax.scan(lambda w, _: (step(w), None), v, None, length=100)[0],
        lambda v: jax.lax.scan(lambda w, _: (step(w), None), v, None, length=100, unroll=10)[0],
    )
    for loop in loops:
        run = jax.jit(loop)
        for _ in range(3):  # compiled, then recorded, then replayed
            found = np.asarray(run(u))[1:-1]
            np.testing.assert_allclose(found, whole[here], rtol=1e-12, atol=1e-14)


def two_plans_keep_their_order(node):
    """Exchanges that do not depend on each other are made in one order on all ranks."""
    rows, whole, here, u = setup(node)
    others = setup(node)[0]

    def both(v, w):
        for _ in range(20):
            v, w = mpishare.jax.exchange(rows, v), mpishare.jax.exchange(others, w)
        return v, w

    v, w = jax.jit(both)(u, 2 * u)
    np.testing.assert_array_equal(2 * v, w)
    np.testing.assert_array_equal(v[1:-1], whole[here])


def independent_exchanges_keep_their_order(node):
    """XLA runs first what is ready first, which is another one on each rank here."""
    halo, whole, here, u = setup(node)
    total = mpishare.Allreduce(WORLD, mpishare.Layout(1), node=node)
    right = np.pad(whole, ((1, 1), (0, 0)), mode="wrap")[here.start : here.stop + 2]

    def all_of(fields):
        found, sums = [], []
        for number, field in enumerate(fields):
            for _ in range((7 * number + 3 * WORLD.rank) % 5):
                field = field @ jnp.eye(COLUMNS)
            found.append(mpishare.jax.exchange(halo, field))
            sums.append(mpishare.jax.dot(total, field[1, :1], jnp.ones(1)))
        return found, sums

    first = sum(WORLD.allgather(float(u[1, 0])))
    for number, (field, of_first) in enumerate(
        zip(*jax.jit(all_of)([n * u for n in range(20)]), strict=True)
    ):
        np.testing.assert_array_equal(field, number * right)
        np.testing.assert_allclose(of_first, number * first, rtol=1e-14)


def several_fields(node):
    like = [mpishare.Layout(CELLS + 2, kind) for kind in ("f4", "i8", "c16")]
    halo = mpishare.HaloExchange(WORLD, like, 1, dims=(WORLD.size,), periods=True, node=node)
    fields = [jnp.full(CELLS + 2, WORLD.rank, each.dtype) for each in like]
    left, right = (WORLD.rank - 1) % WORLD.size, (WORLD.rank + 1) % WORLD.size
    found = jax.jit(lambda *all_: mpishare.jax.exchange(halo, *all_))(*fields)
    assert isinstance(found, tuple)
    for each in found:
        assert (each[0], each[1], each[-1]) == (left, WORLD.rank, right)
    squares = lambda *all_: (mpishare.jax.exchange(halo, *all_)[0] ** 2).sum()  # noqa: E731
    slope = jax.jit(jax.grad(squares))(*fields)  # integers have none
    assert slope.tolist() == [WORLD.rank * each for each in (0, 4, *[2] * (CELLS - 2), 4, 0)]


def any_fields(node):
    """One plan: what is new to it is agreed on while JAX traces, and its reverse too."""
    halo = mpishare.HaloExchange(
        WORLD, mpishare.Layout(CELLS + 2, None), 1, dims=(WORLD.size,), periods=True, node=node
    )
    left, right = (WORLD.rank - 1) % WORLD.size, (WORLD.rank + 1) % WORLD.size
    step = jax.jit(lambda *fields: mpishare.jax.exchange(halo, *fields))
    shapes = [((), "f4"), ((3,), "i8"), ((), "f4")]
    given = [jnp.full((CELLS + 2, *others), WORLD.rank, kind) for others, kind in shapes]
    for fields in (given[:1], given[1:2], given, given[:1]):
        found = step(*fields)
        for each in found if isinstance(found, tuple) else [found]:
            assert each.reshape(CELLS + 2, -1)[:, -1].tolist() == [
                left,
                *[WORLD.rank] * CELLS,
                right,
            ]
    weight = jnp.arange(CELLS + 2.0)
    slope = jax.jit(jax.grad(lambda u: (mpishare.jax.exchange(halo, u) * weight).sum()))
    for kind in ("f4", "f8"):
        found = slope(jnp.ones(CELLS + 2, kind))
        right = [0, 1 + CELLS + 1, *range(2, CELLS), CELLS, 0]
        assert found.dtype == kind
        assert found.tolist() == right, found


def gradients(node):
    """By differences on one rank, walls and all, and by the adjoint over all ranks."""
    for periods in (True, False):
        alone, _, _, v = setup(node, MPI.COMM_SELF, periods)
        ring, _, _, u = setup(node, WORLD, periods)

        def one(w, plan=alone):
            return jnp.sin(stencil(mpishare.jax.exchange(plan, w))) * w

        check_grads(one, (v,), order=2, modes=("fwd", "rev"))
        check_grads(jax.jit(one), (v,), order=1, modes=("fwd", "rev"))

        @jax.jit
        def three(w, plan=ring):
            step = lambda x, _: (jnp.sin(stencil(mpishare.jax.exchange(plan, x))), None)  # noqa: E731
            return jax.lax.scan(step, w, None, length=3)[0]

        seen = jax.random.normal(jax.random.key(WORLD.rank), u.shape, u.dtype)
        for _ in range(3):
            _, tangent = jax.jvp(three, (u,), (u,))
            (cotangent,) = jax.vjp(three, u)[1](seen)
            forward = WORLD.allreduce(float((tangent * seen).sum()))
            backward = WORLD.allreduce(float((u * cotangent).sum()))
            np.testing.assert_allclose(forward, backward, rtol=1e-12)


def no_graph_records_the_host(node):
    """Rank 0 alone has messages, by a route of the host: all ranks call it at every step."""
    places = ([1], [0]) if WORLD.rank == 0 else ([], [])
    sends, recvs = ({0: each} if each else {} for each in places)
    halo = mpishare.NeighborExchange(WORLD, sends, recvs, mpishare.Layout(2, "f8"), node=node)
    traced = jax.jit(lambda v: mpishare.jax.exchange(halo, v)).trace(jnp.zeros(2))
    assert not jax_sums.is_recorded(traced), traced.jaxpr


def seams(node):
    """Fields of other shapes on each rank, or none; rings by shifts; factors, and their slopes."""
    wide = mpishare.Layout(6 + WORLD.rank, "c16")
    fields = [mpishare.Layout((4, 3), "c16"), wide] * (WORLD.rank < 2)
    ring = [(rank, 1, np.s_[3:6]) for rank in range(min(WORLD.size, 2))]
    listed = [
        mpishare.Seam((0, np.s_[:1, :]), (0, 0, np.s_[1:2, :]), flip=(1,), scale=2j),
        mpishare.Seam((1, np.s_[:2]), ring, along=0, shift="by"),
    ] * (WORLD.rank < 2)
    plan = mpishare.SeamExchange(WORLD, fields, listed, node=node, backend=node.backend)
    u = [jnp.arange(np.prod(each.shape), dtype="c16").reshape(each.shape) for each in fields]
    found = jax.jit(lambda *v: mpishare.jax.exchange(plan, *v, shift={"by": 4}))(*u)
    if WORLD.rank < 2:
        assert found[0][0].tolist() == [10j, 8j, 6j]
        assert found[1].tolist() == [4, 5, *range(2, 6 + WORLD.rank)]
    with pytest.raises(ValueError, match="shift= must name"):
        mpishare.jax.exchange(plan, *u)
    alone = [mpishare.Seam((0, np.s_[:1]), (0, 0, np.s_[2:3]), scale=1 - 2j)]
    plan = mpishare.SeamExchange(MPI.COMM_SELF, [wide], alone, node=node)
    v = jnp.arange(6.0 + WORLD.rank) + 1j
    check_grads(lambda w: mpishare.jax.exchange(plan, w), (v,), order=2, modes=("fwd", "rev"))
    alone = [mpishare.Seam((0, np.s_[:1]), (0, 0, np.s_[2:3]), offset=1)]
    plan = mpishare.SeamExchange(MPI.COMM_SELF, [wide], alone, node=node)
    assert mpishare.jax.exchange(plan, v)[0] == v[2] + 1
    with pytest.raises(NotImplementedError, match="offsets have no derivative"):
        jax.jvp(lambda w: mpishare.jax.exchange(plan, w), (v,), (v,))


def what_is_refused(node):
    halo, _, _, u = setup(node)
    one = lambda v: mpishare.jax.exchange(halo, v)  # noqa: E731
    for call, kind, text in (
        (lambda: mpishare.jax.exchange(halo, u[1:]), ValueError, "shape (7, 5) instead of (8, 5)"),
        (lambda: mpishare.jax.exchange(halo, u.astype("f4")), ValueError, "float32 instead of"),
        (lambda: mpishare.jax.exchange(halo, u, u), ValueError, "2 fields given"),
        (lambda: mpishare.jax.exchange(halo, 1.0), TypeError, "field 0 is not an array of JAX"),
        (lambda: jax.vmap(one)(u[None]), NotImplementedError, "cannot be mapped by jax.vmap"),
        (lambda: jax.hessian(one)(u), NotImplementedError, "name by axes="),
        (lambda: halo.exchange(u), TypeError, "is a JAX array"),
        (lambda: jax.jit(lambda v: halo.exchange(v))(u), TypeError, "is a JAX array"),
    ):
        with pytest.raises(kind, match=f"{halo.name}: exchange failed: .*{re.escape(text)}"):
            call()
    with pytest.raises(TypeError, match="field 0 is a JAX array"):
        mpishare.HaloExchange(WORLD, u, 1, axes=0, dims=(WORLD.size,), node=node)
    total = mpishare.Allreduce(WORLD, node.xp.zeros(u.shape), node=node)
    with pytest.raises(TypeError, match=r"for a Redistribute copy it, node\.xp\.array"):
        total.reduce(u)
    copy = node.xp.array(jax.block_until_ready(u))
    total.reduce(copy)
    np.testing.assert_allclose(float(copy.sum()), WORLD.allreduce(float(u.sum())))
    for first in (total, u):
        with pytest.raises(TypeError, match="takes the plan of an exchange"):
            mpishare.jax.exchange(first, u)
    halo.close()
    with pytest.raises(mpishare.ClosedError, match="the plan is closed"):
        jax.jit(lambda v: mpishare.jax.exchange(halo, v))(u)


CHECKS = {
    check.__name__: check
    for check in (
        is_padded, steps_in_a_loop, two_plans_keep_their_order,
        independent_exchanges_keep_their_order, several_fields, any_fields, gradients,
        no_graph_records_the_host, seams, what_is_refused, *jax_sums.CHECKS,
    )
}  # fmt: skip

if __name__ == "__main__":
    messages, *names = sys.argv[1:]
    with local_node(messages) as node:
        for name in names:
            CHECKS[name](node)
            print(f"{name}: right", flush=True)

"""Checks of the sums of `mpishare.jax`, which `jax_program` runs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from mpi4py import MPI

import mpishare
import mpishare.jax
from tests.helpers.exact import exact_dot, factors, part

WORLD = MPI.COMM_WORLD
dot_now, reduce_now = (
    jax.jit(each, static_argnums=0) for each in (mpishare.jax.dot, mpishare.jax.reduce)
)


def totals(node):
    """Of any dtype and operation, exact or not, called at once, compiled and in a loop."""
    for dtype in ("f8", "f4", "c16", "i8"):
        whole = [each.astype(dtype) for each in factors("alike", 3, 2000)]
        x, y = (jnp.asarray(part(each, 3, WORLD.rank, WORLD.size)) for each in whole)
        mine = jnp.arange(3).astype(dtype) + WORLD.rank
        for exact in {False, dtype != "i8"}:
            total = mpishare.Allreduce(WORLD, mpishare.Layout(3, dtype), exact=exact, node=node)
            for call in (mpishare.jax.reduce, *[reduce_now] * 3):  # compiled, recorded, replayed
                found = call(total, mine)
                assert found.tolist() == sum(WORLD.allgather(np.asarray(mine))).tolist()
                found = (mpishare.jax.dot if call is not reduce_now else dot_now)(total, x, y)
                assert (found.shape, found.dtype) == ((), dtype)
                np.testing.assert_allclose(found, np.vdot(*whole), 1e-4 if dtype == "f4" else 1e-9)
                if exact:
                    assert np.asarray(found).tobytes() == exact_dot(*whole, dtype).tobytes()
                    # XLA's threads on the host would take it for zero.
                    least = np.full(2, np.finfo(dtype).smallest_subnormal, dtype)
                    assert dot_now(total, least, np.ones_like(least)) == 2 * WORLD.size * least[0]
    most = mpishare.Allreduce(WORLD, mpishare.Layout(2), "max", node=node)
    found = reduce_now(most, jnp.array([1.0, -1.0]) * WORLD.rank)
    assert found.tolist() == [WORLD.size - 1, 0]
    grown = lambda v: jax.lax.cond(v[0] < 5, lambda: mpishare.jax.reduce(most, v) + 1, lambda: v)  # noqa: E731
    found = jax.jit(lambda v: jax.lax.fori_loop(0, 9, lambda _, w: grown(w), v))(jnp.zeros(2))
    assert found.tolist() == [5, 5]


def a_conjugate_gradient(node):
    """In one program: the residuals of all ranks together have the bits of those of one alone."""
    rows, columns, most = 12, 37, 100
    whole = np.random.default_rng(7).standard_normal((rows, columns))

    def residuals(comm, exact):
        like = mpishare.Layout((rows // comm.size + 2, columns))
        halo = mpishare.HaloExchange(comm, like, 1, axes=(0,), dims=(comm.size,), node=node)
        total = mpishare.Allreduce(comm, mpishare.Layout(1), exact=exact, node=node)

        def dot(v, w):
            return mpishare.jax.dot(total, v, w)

        def laplacian(p):
            u = mpishare.jax.exchange(halo, jnp.pad(p, ((1, 1), (0, 0))))
            sides = jnp.pad(p, ((0, 0), (1, 1)))
            return 4 * p - u[:-2] - u[2:] - sides[:, :-2] - sides[:, 2:]

        def step(state):
            k, x, r, p, seen = state
            q = laplacian(p)
            alpha = seen[k] / dot(p, q)
            r = r - alpha * q
            rr = dot(r, r)
            return k + 1, x + alpha * p, r, r + rr / seen[k] * p, seen.at[k + 1].set(rr)

        def is_going(state):
            k, *_, seen = state
            return (k < most) & (seen[k] > 1e-4)

        @jax.jit
        def solve(b):
            seen = jnp.zeros(most + 1).at[0].set(dot(b, b))
            k, x, *_, seen = jax.lax.while_loop(is_going, step, (0, jnp.zeros_like(b), b, b, seen))
            left = b - laplacian(x)
            return k, seen, dot(left, left)

        k, seen, left = solve(jnp.asarray(np.split(whole, comm.size)[comm.rank]))
        assert 10 < k < most, k
        np.testing.assert_allclose(left, seen[k], rtol=1e-5)
        return np.asarray(seen).tobytes()

    of_all = residuals(WORLD, exact=True)
    assert of_all == residuals(MPI.COMM_SELF, exact=True)
    assert {*WORLD.allgather(of_all)} == {of_all}


def gradients_of_sums(node):
    """By differences on one rank, and by the adjoint over all ranks."""
    for dtype, exact in (("f8", True), ("c16", False)):
        of_one, of_all = (
            mpishare.Allreduce(comm, mpishare.Layout(5, dtype), exact=exact, node=node)
            for comm in (MPI.COMM_SELF, WORLD)
        )

        def product(v, w, total):
            v = mpishare.jax.reduce(total, jnp.sin(v))
            return mpishare.jax.dot(total, v, w) * v

        keys = jax.random.split(jax.random.key(WORLD.rank), 3)
        x, y, seen = (jax.random.normal(key, 5, dtype) for key in keys)
        one = jax.jit(lambda v, w, total=of_one: product(v, w, total))
        check_grads(one, (x, y), 1 + (not exact), modes=("fwd", "rev"))

        @jax.jit
        def both_ways(v, w, seen, total=of_all):
            f = lambda v, w: product(v, w, total)  # noqa: E731
            cotangents = jax.vjp(f, v, w)[1](seen)
            backward = sum((a * b).sum() for a, b in zip((v, w), cotangents, strict=True))
            return (jax.jvp(f, (v, w), (v, w))[1] * seen).sum(), backward

        for fields in ((x, y), (y, x)):
            forward, backward = (
                sum(WORLD.allgather(float(each.real))) for each in both_ways(*fields, seen)
            )
            np.testing.assert_allclose(forward, backward, rtol=1e-12)


def is_recorded(traced):
    """Whether a graph of CUDA's may record the calls of a program that was traced."""
    program = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "xla_buffer_python_gpu_callback" in program, program
    return "xla_buffer_python_gpu_callback_cmd_buffer" in program


def no_graph_records_messages(node):
    """Sums within a node are recorded, but not those that MPI takes from node to node."""
    for comm, is_whole in ((node.comm, True), (WORLD, node.size == WORLD.size)):
        total = mpishare.Allreduce(comm, mpishare.Layout(2), node=node)
        v = jnp.zeros(2)
        assert is_recorded(reduce_now.trace(total, v)) == is_whole
        assert is_recorded(dot_now.trace(total, v, v)) == is_whole


def what_sums_refuse(node):
    total = mpishare.Allreduce(WORLD, mpishare.Layout(3), node=node)
    most = mpishare.Allreduce(WORLD, mpishare.Layout(3), "max", node=node)
    x = jnp.ones(3)
    reduce, dot = mpishare.jax.reduce, mpishare.jax.dot
    for call, kind, text in (
        (lambda: reduce(x, x), TypeError, "jax.reduce failed: it takes an Allreduce"),
        (lambda: dot(x, x, x), TypeError, "jax.dot failed: it takes an Allreduce"),
        (lambda: reduce(total, 1.0), TypeError, "reduce failed: array 0 is not an"),
        (lambda: dot(total, x, [1.0]), TypeError, "dot failed: array 1 is not an"),
        (lambda: reduce(total, x[1:]), ValueError, "reduce failed: the array has another layout"),
        (lambda: dot(total, x, x[1:]), ValueError, "dot failed: y is float64(2,) instead of"),
        (lambda: dot(total, x.astype("f4"), x), ValueError, "dot failed: x is float32(3,) instead"),
        (lambda: dot(most, x, x), ValueError, "dot failed: it is a sum"),
        (
            lambda: jax.grad(lambda v: reduce(most, v)[0])(x),
            NotImplementedError,
            "has derivatives",
        ),
        (
            lambda: jax.vmap(lambda v: reduce(most, v))(x[None]),
            NotImplementedError,
            "reduce failed",
        ),
        (lambda: jax.vmap(lambda v: dot(total, v, v))(x[None]), NotImplementedError, "dot failed"),
    ):
        with pytest.raises(kind, match=re.escape(text)):
            call()
    assert jax.block_until_ready(dot_now(total, x, x)) == 3 * WORLD.size
    total.close()
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"{total.name}: dot.*plan is closed"):
        jax.block_until_ready(dot_now(total, x, x))
    with pytest.raises(mpishare.ClosedError, match="reduce failed: the plan is closed"):
        reduce_now(total, x)


CHECKS = (
    totals, a_conjugate_gradient, gradients_of_sums, no_graph_records_messages, what_sums_refuse
)  # fmt: skip

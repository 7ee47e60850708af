"""Exact sums: the bits of the exact value, rounded once, for any partition, on every backend."""

import numpy as np
import pytest

import mpishare
from mpishare import Allreduce, Layout
from mpishare.errors import MismatchError
from tests.helpers.captures import skip_where_ranks_take_turns
from tests.helpers.exact import CASES, exact_dot, factors, part, rounded_sum
from tests.helpers.reductions import laid_out, on_host

DTYPES = ("f8", "f4", "f2", "c16", "c8")


def on_all(node, found, wanted):
    """Every rank has it, to the bit; any NaN is as good as another."""
    found, wanted = np.atleast_1d(on_host(found)), np.atleast_1d(wanted)
    real = found.real.dtype
    found, wanted = found.view(real), wanted.view(real)
    is_nan = np.isnan(wanted)
    same = np.array_equal(np.isnan(found), is_nan)
    same &= np.where(is_nan, 0, found).tobytes() == np.where(is_nan, 0, wanted).tobytes()
    return all(node.comm.allgather(bool(same)))


def as_dtype(x, y, dtype):
    kind = np.dtype(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        if kind.kind == "c":
            return (x[0::2] + 1j * x[1::2]).astype(kind), (y[0::2] + 1j * y[1::2]).astype(kind)
        return x.astype(kind), y.astype(kind)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dot(node, dtype, case):
    xp = node.xp
    with Allreduce(node.comm, Layout(1, dtype), exact=True, node=node) as total:
        for seed, count in enumerate((2, 6, 300, 2000)):
            x, y = as_dtype(*factors(case, seed, count), dtype)
            mine = [xp.asarray(part(each, seed, node.rank, node.size)) for each in (x, y)]
            for _ in range(2):
                assert on_all(node, total.dot(*mine), exact_dot(x, y, dtype)), (seed, count)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce(node, dtype, case):
    x, y = factors(case, 7, 66 * node.size)
    with np.errstate(all="ignore"):
        mine, _ = as_dtype(x * y, y, dtype)
    rows = mine.reshape(node.size, -1)
    real = rows.real.dtype
    ones = np.ones(node.size)
    columns = rows.view(real).T
    wanted = np.array([rounded_sum([(each, ones)], real) for each in columns]).view(rows.dtype)
    array = node.xp.asarray(rows[node.rank])
    with Allreduce(node.comm, array, exact=True, node=node) as total:
        for _ in range(3):
            x = array.copy()
            total.reduce(x)
            assert on_all(node, x, wanted)


@pytest.mark.parametrize("count", [20_000, 300_001])
def test_large(node, count):
    """By shares, in place, by reads; on GPUs by slices."""
    rng = np.random.default_rng(3)
    rows = np.ldexp(rng.standard_normal((node.size, count)), rng.integers(-40, 40, count))
    array = node.xp.asarray(rows[node.rank].copy())
    with Allreduce(node.comm, array, exact=True, node=node) as total:
        total.reduce(array)
        some = rng.integers(0, count, 200)
        ones = np.ones(node.size)
        wanted = [rounded_sum([(rows[:, at], ones)], "f8") for at in some]
        assert on_all(node, on_host(array)[some], np.array(wanted))


@pytest.mark.parametrize("form", ["F", "strided", "turned"])
def test_any_strides(node, form):
    x, y = (each.reshape(20, 15) for each in factors("wide", 2, 300))
    with Allreduce(node.comm, Layout(1), exact=True, node=node) as total:
        found = total.dot(laid_out(node.xp, x, form), laid_out(node.xp, y, form))
        wanted = rounded_sum([(x.ravel(), y.ravel())] * node.size, "f8")
        assert on_all(node, found, wanted)


def test_captured(node):
    """Each replay sums what the arrays hold by then."""
    skip_where_ranks_take_turns(node)
    rows = [factors("wide", seed, 200 * node.size) for seed in (1, 2)]
    x, out = node.xp.zeros(200), node.xp.zeros(1)
    with Allreduce(node.comm, x, exact=True, node=node) as total:

        def step():
            total.dot(x, x, out=out)
            total.reduce(x)

        with mpishare.capture(node, step) as replay:
            for both, _ in (*rows, *rows):
                parts = both.reshape(node.size, -1)
                x[...] = node.xp.asarray(parts[node.rank])
                replay()
                node.synchronize()
                assert on_all(node, out[0], rounded_sum([(both, both)], "f8"))
                ones = np.ones(node.size)
                wanted = [rounded_sum([(parts[:, at], ones)], "f8") for at in range(200)]
                assert on_all(node, x, np.array(wanted))


def test_an_empty_product_is_zero(node):
    nothing = node.xp.empty(0)
    with Allreduce(node.comm, Layout(1), exact=True, node=node) as total:
        assert on_all(node, total.dot(nothing, nothing), np.zeros(()))


@pytest.mark.ranks(min=2)
def test_all_ranks_want_it_exact(node):
    with pytest.raises(MismatchError, match="exact"):
        Allreduce(node.comm, Layout(1), exact=node.rank == 0, node=node)


@pytest.mark.parametrize(
    ("op", "dtype", "why"),
    [
        ("max", "f8", "does not depend on the ranks"),
        ("prod", "f8", "has no exact form"),
        ("prod", "i8", "does not depend on the ranks"),
        ("sum", "i8", "does not depend on the ranks"),
    ],
)
def test_sums_of_floats_alone(node, op, dtype, why):
    with pytest.raises(TypeError, match=f"exact=True.*{why}"):
        Allreduce(node.comm, Layout(1, dtype), op, exact=True, node=node)


@pytest.mark.parametrize("exact", ["no", None, 1])
def test_exact_is_a_bool(node, exact):
    with pytest.raises(TypeError, match="exact must be True or False"):
        Allreduce(node.comm, Layout(1), exact=exact, node=node)


def test_its_name_says_that_it_is_exact(node):
    with Allreduce(node.comm, Layout(3), exact=np.True_, node=node) as total:
        assert ": exact sum of float64(3,)" in repr(total)

"""Reductions without ranks: operations, packing, local dot products, quiet arithmetic."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpishare.plans.layout import FieldLayout
from mpishare.reduction.host import store_dot
from mpishare.reduction.operation import Operation, quiet_runner
from tests.helpers.reductions import FORMS, UFUNCS, folded, laid_out, pairs

TAKEN = set(pairs())


@pytest.mark.parametrize("op", UFUNCS)
@pytest.mark.parametrize("dtype", ["?", "i1", "u8", "f2", "f8", "c8", "c16"])
def test_which_operations_there_are(op, dtype):
    if (op, dtype) in TAKEN:
        x, y = np.array([0, 1], dtype), np.array([1, 1], dtype)
        wanted = folded(op, [x, y, y])
        Operation(op, np.dtype(dtype)).fold([x, y, y], x)
        assert (x == wanted).all()
    else:
        with pytest.raises(TypeError, match=f"have no {op}|{op} takes integers and bool"):
            Operation(op, np.dtype(dtype))


@pytest.mark.parametrize("dtype", [">i4", "g", "G", "O", "S3", "U2", "V8", "M8[s]", "f8,i4"])
def test_elements_that_cannot_be_reduced(dtype):
    with pytest.raises(TypeError, match="cannot be reduced"):
        Operation("max", np.dtype(dtype))


@pytest.mark.parametrize(
    ("dtype", "remedy"),
    [(">i4", r"x\.astype\(x\.dtype\.newbyteorder\('='\)\)$"), ("f8,i4", r"such as x\['f0'\]$")],
)
def test_how_to_give_such_elements_as_numbers(dtype, remedy):
    with pytest.raises(TypeError, match=remedy):
        Operation("sum", np.dtype(dtype))


@pytest.mark.parametrize("op", ["maxloc", "minloc"])
@pytest.mark.parametrize("dtype", ["?", "i4", "u8", "f4", "f8"])
def test_indices_are_beside_the_values(op, dtype):
    with pytest.raises(TypeError, match=rf"{op} takes complex numbers: .* x \+ 1j \* comm.rank"):
        Operation(op, np.dtype(dtype))


def test_every_name_of_a_dtype_is_one_dtype():
    """A C `long long` is another object than a `long`, of the same elements."""
    for code in "bhilqBHILQefdFD":
        assert Operation("sum", np.dtype(code)).dtype == np.dtype(code)


@given(shape=st.lists(st.integers(0, 4), max_size=4).map(tuple), form=st.sampled_from(FORMS))
def test_what_is_packed(shape, form):
    """As NumPy sees it; then a flat view of it needs no copy."""
    array = laid_out(np, np.ones(shape), form)
    for order, flag in (("C", array.flags.c_contiguous), ("F", array.flags.f_contiguous)):
        assert FieldLayout.of_host(array).is_packed(order) == flag
        if flag and array.size:
            assert np.shares_memory(array.reshape(-1, order=order), array)


@given(
    shape=st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple),
    forms=st.tuples(st.sampled_from(FORMS), st.sampled_from(FORMS)),
    seed=st.integers(0, 100),
)
def test_a_local_dot_product(shape, forms, seed):
    """Integers are exact; a few elements more than a block, and blocks of several rows."""
    rng = np.random.default_rng(seed)
    x, y = (laid_out(np, rng.integers(-99, 99, shape), form) for form in forms)
    total = np.empty(1, int)
    store_dot(total, x, y)
    assert total[0] == (x * y).sum()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "shape", [(8192,), (8193,), (2, 9000), (9000, 2), (3, 3, 1000), (1, 20_000)]
)
def test_a_local_dot_product_of_many_blocks(form, shape):
    rng = np.random.default_rng(3)
    x, y = (laid_out(np, rng.standard_normal(shape), form) for _ in range(2))
    total = np.empty(1)
    store_dot(total, x, y)
    right = float(sum(Fraction(a) * Fraction(b) for a, b in zip(x.flat, y.flat, strict=True)))
    assert math.isclose(total[0], right, rel_tol=1e-12, abs_tol=1e-12 * x.size)


def test_bits_do_not_depend_on_where_an_array_lies():
    rng = np.random.default_rng(4)
    x, y = rng.standard_normal((2, 20_000))
    found = set()
    for shift in range(8):
        base = np.empty((2, 20_008))
        moved = base[:, shift : shift + 20_000]
        moved[...] = x, y
        total = np.empty(1)
        store_dot(total, moved[0], moved[1])
        found.add(total.tobytes())
    assert len(found) == 1


@pytest.mark.parametrize("version", [np.__version__, "1.26.4"])
def test_nothing_warns_or_raises_and_the_user_s_own_errstate_stays(monkeypatch, version):
    monkeypatch.setattr(np, "__version__", version)
    run, large = quiet_runner(), np.full(3, 1e308)
    with np.errstate(all="raise"):
        run(np.add, large, large, large)
        assert np.isinf(large).all()
        assert np.geterr()["over"] == "raise"
        with pytest.raises(FloatingPointError):
            np.add(np.full(1, 1e308), 1e308)

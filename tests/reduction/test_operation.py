"""Reductions without ranks: operations, packing, local dot products, quiet arithmetic."""

from itertools import product

import numpy as np
import pytest

from mpishare.reduction.host import store_dot
from mpishare.reduction.operation import Operation, quiet_runner
from tests.helpers.reductions import FORMS, laid_out

REFUSED = [
    *(("max", dtype, "cannot be reduced") for dtype in ("g", "G", "O", "S3", "U2", "V8", "M8[s]")),
    ("max", ">i4", r"cannot be reduced.*x\.astype\(x\.dtype\.newbyteorder\('='\)\)$"),
    ("max", "c16", "have no max"),
    ("band", "f8", "band takes integers and bool"),
    ("sum", "f8,i4", r"cannot be reduced.*such as x\['f0'\]$"),
    *(
        (op, dtype, rf"{op} takes complex numbers: .* x \+ 1j \* comm.rank")
        for op in ("maxloc", "minloc")
        for dtype in ("?", "i4", "u8", "f4", "f8")
    ),
]


@pytest.mark.parametrize(("op", "dtype", "words"), REFUSED)
def test_elements_that_cannot_be_reduced(op, dtype, words):
    """And how to give them as numbers."""
    with pytest.raises(TypeError, match=words):
        Operation(op, np.dtype(dtype))


def test_every_name_of_a_dtype_is_one_dtype():
    """A C `long long` is another object than a `long`, of the same elements."""
    for code in "bhilqBHILQefdFD":
        assert Operation("sum", np.dtype(code)).dtype == np.dtype(code)


SHAPES = ((0,), (3, 0), (40, 5), (8192,), (8193,), (2, 9000), (9000, 2), (3, 3, 1000), (1, 20_000))


@pytest.mark.parametrize("dtype", [int, float])
@pytest.mark.parametrize("forms", [*product(FORMS, FORMS)], ids=str)
def test_a_local_dot_product(forms, dtype):
    """Of whole numbers, so exact; a few elements more than a block, and blocks of several rows."""
    rng, total = np.random.default_rng(3), np.empty(1, dtype)
    for shape in SHAPES:
        x, y = (laid_out(np, rng.integers(-99, 99, shape).astype(dtype), form) for form in forms)
        store_dot(total, x, y)
        assert total[0] == (x * y).sum(), shape


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

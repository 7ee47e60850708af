"""Extents of a grid and the axes that wrap, as users write them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpishare.halo.geometry import normalize_dims, normalize_periods


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_every_factoring_fits_and_so_does_any_part_of_it(factors, data):
    size = int(np.prod(factors))
    given_dims = [data.draw(st.sampled_from([n, 0])) for n in factors]
    assert normalize_dims(given_dims, size) == tuple(given_dims)
    assert normalize_dims(np.array(factors), size) == tuple(factors)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 700))
def test_no_other_product_fits(factors, size):
    if np.prod(factors) == size:
        return
    with pytest.raises(ValueError, match=f"the communicator has {size}"):
        normalize_dims(factors, size)


@pytest.mark.parametrize("wrong", [3, None, 2.0, (), (1.0,), "12", (-1, -2), (None,), [[1, 2]]])
def test_dims_that_are_none(wrong):
    with pytest.raises(ValueError, match="dims must be ints of 0 or more"):
        normalize_dims(wrong, 2)


@pytest.mark.parametrize(
    "wrong", [2, "yes", (True,), (True, True, True), (True, None), (0, 2), (0.0, 1.0), ()]
)
def test_periods_that_are_none(wrong):
    with pytest.raises(ValueError, match="periods must be a bool, or one for each axis"):
        normalize_periods(wrong, 2)


def test_periods():
    assert normalize_periods(None, 2) == (False, False)
    assert normalize_periods(True, 2) == (True, True)
    assert normalize_periods((1, 0), 2) == (True, False)

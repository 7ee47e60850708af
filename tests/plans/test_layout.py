"""Layouts of fields: what fits, what is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpishare.plans.layout import Layout, host_layout

EMPTY = np.zeros((4, 2))[:0]


@pytest.mark.parametrize("strides", [(0, 0), (8, 8), (16, 8)])
def test_an_array_without_elements_may_have_any_strides(strides):
    """NumPy makes them zero in some calls, and a rank may have no cells."""
    array = np.lib.stride_tricks.as_strided(EMPTY, (0, 2), strides)
    assert array.strides == strides
    host_layout(EMPTY, "it").require(host_layout(array, "it"))


def test_an_array_with_elements_may_not():
    array = np.lib.stride_tricks.as_strided(np.zeros(1), (1, 2), (0, 0))
    with pytest.raises(ValueError, match="it has strides"):
        host_layout(array, "it")
    with pytest.raises(ValueError, match="strides"):
        host_layout(np.zeros((2, 3)), "it").require(host_layout(np.zeros((3, 2)).T, "it"))


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros(6, "f4"), "dtype float32 instead of float64. Make another plan"),
        (np.zeros(7), r"shape \(7,\) instead of \(6,\). Make another plan"),
        (np.zeros(12)[::2], r"strides \(16,\) instead of \(8,\). Store it.* numpy.ascontig"),
    ],
)
def test_the_difference_that_users_see(array, words):
    """Strides that follow from another dtype or shape are not told."""
    with pytest.raises(ValueError, match=rf"was made for: {words}"):
        host_layout(np.zeros(6), "it").require(host_layout(array, "it"))


def test_the_remedy_is_the_order_of_the_plan():
    wanted = host_layout(np.zeros((2, 3), order="F"), "it")
    with pytest.raises(
        ValueError,
        match=r"u = numpy.asfortranarray\(u\), or make another.*\(halo exchanges of Layout.any",
    ):
        wanted.require(host_layout(np.zeros((2, 3)), "it"))


@given(
    st.lists(st.integers(0, 4), max_size=4).map(tuple),
    st.sampled_from([float, "f4", np.int16, np.dtype("c16"), "V3"]),
    st.sampled_from("CF"),
)
def test_a_layout_is_that_of_the_array_that_numpy_makes(shape, dtype, order):
    array = np.zeros(shape, dtype, order)
    Layout(shape, dtype, order).of_field().require(host_layout(array, "it"))
    if 0 not in shape:
        assert Layout(shape, dtype, order).of_field().strides == array.strides


def test_what_users_write():
    assert Layout(3) == Layout((3,), float, "C") == Layout([np.int64(3)], "f8")
    assert Layout(np.array(3)) == Layout(3)
    assert Layout(np.array([2, 3])) == Layout((2, 3))
    assert Layout((2, 3), "f4").dtype == np.float32
    assert repr(Layout((2, 3))) == "Layout(shape=(2, 3), dtype=dtype('float64'), order='C')"


@pytest.mark.parametrize(
    ("dtype", "order", "kind"),
    [("float65", "C", TypeError), (float, "A", ValueError), (float, None, ValueError)],
)
def test_dtypes_and_orders_that_are_none(dtype, order, kind):
    with pytest.raises(kind):
        Layout(2, dtype, order)

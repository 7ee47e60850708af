"""Cells of arrays in host memory, stored by NumPy and found by their addresses."""

import numpy as np
import pytest

from mpishare.halo.host.route import add
from mpishare.plans.layout import array_at, host_layout


@pytest.mark.parametrize(
    "key", [(slice(1, 3), slice(0, 2)), (np.array([1, 0]), slice(0, 2)), (np.array([2, 2]),)]
)
def test_what_is_added(key):
    """Also twice to the same cell."""
    array = np.arange(12.0).reshape(4, 3)
    cells = np.random.default_rng(1).integers(0, 9, array[key].shape)
    right = array.copy()
    places = np.arange(12).reshape(4, 3)[key]
    for place, cell in zip(places.flat, cells.flat, strict=True):
        right.flat[place] += cell
    add(array, key, cells)
    assert (array == right).all()


@pytest.mark.parametrize("dtype", ["f8", "u1", "c16", "i4,i4"])
def test_array_at(dtype):
    array = np.zeros((3, 5, 4), dtype)[:, 1:4, ::2]
    seen = array_at(array.__array_interface__["data"][0], host_layout(array, "it"))
    assert (seen.shape, seen.strides, seen.itemsize) == (array.shape, array.strides, array.itemsize)
    array.view(seen.dtype)[1:, 2, 1] = np.ones((), dtype).view(seen.dtype)
    assert (seen.view(array.dtype) == array).all()
    assert seen.base is not array

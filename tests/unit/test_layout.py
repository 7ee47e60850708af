"""Layouts of fields: what fits, what is refused."""

import numpy as np
import pytest

from mpishare.halo.layout import host_layout

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

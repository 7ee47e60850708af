"""Whether fields of a plan share memory, told from where they stand."""

import contextlib
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpishare.plans.fields import require_disjoint
from mpishare.plans.layout import host_layout

MEMORY = np.zeros(400)


@st.composite
def fields(draw):
    """A part of one memory in any steps: a component, a slice, a window that slides."""
    axes = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 12)), min_size=1, max_size=3))
    dtype, start = draw(st.sampled_from(["f8", "i4"])), draw(st.integers(0, 40))
    shape, steps = zip(*axes, strict=True)
    strides = [8 * step for step in steps]
    return np.lib.stride_tricks.as_strided(MEMORY[start:].view(dtype), shape, strides)


def words(field):
    """The words of four bytes of each cell."""
    begin = field.ctypes.data + np.tensordot(field.strides, np.indices(field.shape), 1).ravel()
    return [word for each in begin.tolist() for word in range(each, each + field.itemsize, 4)]


@given(st.lists(fields(), min_size=1, max_size=3))
def test_fields_and_cells_that_share_memory_are_refused_and_no_others(given):
    taken = [words(field) for field in given]
    twice = [n for n, each in enumerate(taken) if len({*each}) < len(each)]
    pairs = [(a, b) for a, b in combinations(range(len(given)), 2) if {*taken[a]} & {*taken[b]}]
    if twice:
        text = rf"field {twice[0]} has two cells in the same memory: its strides are \(\d+,"
    else:
        text = "".join(f"fields {a} and {b} share memory" for a, b in pairs[:1])
    with pytest.raises(ValueError, match=text) if text else contextlib.nullcontext():
        require_disjoint(given, [host_layout(field, "a field") for field in given])

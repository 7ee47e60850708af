"""Whether fields of a plan share memory, told from where they stand."""

import numpy as np
import pytest

from mpishare.plans.fields import require_disjoint
from mpishare.plans.layout import host_layout

BLOCK = np.zeros((12, 14, 6))
GRID = np.zeros((8, 9))


def require(*fields):
    require_disjoint(list(fields), [host_layout(field, "a field") for field in fields])


def strided(shape, *strides):
    return np.lib.stride_tricks.as_strided(GRID, shape, [8 * step for step in strides])


APART = {
    "one": (GRID,),
    "two": (GRID, GRID.copy()),
    "components": (BLOCK[..., 0], BLOCK[..., 1], BLOCK[..., 5]),
    "halves": (BLOCK[:, :7], BLOCK[:, 7:]),
    "in turns": (BLOCK[::2], BLOCK[1::2]),
    "nothing": (BLOCK[:0], BLOCK),
    "interleaved": (strided((2, 3), 3, 2),),
    "one cell": (strided((3, 1, 4), 4, 1, 1),),
    "steps": (GRID[::2, ::3],),
    "transposed": (GRID.T,),
    "a component": (BLOCK[..., 3],),
}


@pytest.mark.parametrize("what", APART)
def test_fields_and_cells_that_are_apart(what):
    require(*APART[what])


@pytest.mark.parametrize(
    "fields",
    [
        (GRID, GRID),
        (GRID, GRID[:]),
        (GRID, GRID.copy(), GRID),
        (BLOCK[:, :8], BLOCK[:, 7:]),
        (BLOCK[::2], BLOCK[::3]),
        (GRID, GRID.view("i4")),
        (GRID, GRID.T),
    ],
    ids=["twice", "a view", "first and last", "halves", "in turns", "dtypes", "orders"],
)
def test_fields_that_share_an_element(fields):
    last = len(fields) - 1
    with pytest.raises(ValueError, match=f"fields 0 and {last} share memory"):
        require(*fields)


@pytest.mark.parametrize(
    "field",
    [strided((3, 3), 1, 1), strided((3, 4), 3, 2), strided((4, 2, 3), 5, 9, 1)],
    ids=["a sliding window", "interleaved", "three axes"],
)
def test_cells_that_share_memory(field):
    with pytest.raises(ValueError, match="field 1 has two cells in the same memory"):
        require(BLOCK, field)
    alone = r"field 0 has two cells in the same memory: its strides are \(\d+, .*"
    with pytest.raises(ValueError, match=alone):
        require(field)

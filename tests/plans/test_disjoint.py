"""Whether fields of a plan share memory, told from where they stand."""

import numpy as np
import pytest

from mpishare.plans.fields import require_disjoint
from mpishare.plans.layout import host_layout

BLOCK = np.zeros((12, 14, 6))
GRID = np.zeros((8, 9))


def require(*fields):
    require_disjoint(list(fields), [host_layout(field, "a field") for field in fields])


@pytest.mark.parametrize(
    "fields",
    [
        (GRID,),
        (GRID, GRID.copy()),
        (BLOCK[..., 0], BLOCK[..., 1], BLOCK[..., 5]),
        (BLOCK[:, :7], BLOCK[:, 7:]),
        (BLOCK[::2], BLOCK[1::2]),
        (BLOCK[:0], BLOCK),
    ],
    ids=["one", "two", "components", "halves", "in turns", "nothing"],
)
def test_fields_that_are_apart(fields):
    require(*fields)


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

"""What ranks of a plan of rows must agree on."""

import pytest

from mpishare.rows.form import keys_of


def test_sides_lead_back():
    """Four ranks in a ring, but the last two in a grid of 2 x 2: the sides have the same names."""
    ring = [[[[0, -1], (rank - 1) % 4], [[0, 1], (rank + 1) % 4]] for rank in range(4)]
    assert [key.rank for key in keys_of(ring, 0)] == [3, 1]
    grid = [[[[0, side], (rank + 2) % 4] for side in (-1, 1)] for rank in range(4)]
    with pytest.raises(ValueError, match=r"rank 0 has peer 3, which .* rank 0 at \(0, 1\)"):
        keys_of(ring[:2] + grid[2:], 0)

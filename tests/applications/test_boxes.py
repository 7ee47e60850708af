"""The boxes of the applications: every cell once."""

import itertools

import numpy as np
import pytest

from scripts.applications import boxes

SHAPES = ((9, 14), (40, 35), (3, 300), (3, 3), (9, 14, 7), (6, 6, 36), (34, 4, 66))


def splits(shape):
    """The owned cells, and every interior that grids leave, as it is and in whole lines."""
    owned = tuple(slice(1, n - 1) for n in shape)
    for cut in itertools.product((0, 1), repeat=len(shape)):
        inner = tuple(slice(1 + c, max(1 + c, n - 1 - c)) for c, n in zip(cut, shape, strict=True))
        for cells in (1, 16):
            yield owned, inner, boxes.in_lines(inner, owned, cells), cells


@pytest.mark.parametrize("shape", SHAPES)
def test_interior_and_shell_are_the_owned_cells(shape):
    for owned, inner, interior, cells in splits(shape):
        counts, right = np.zeros(shape, int), np.zeros(shape, int)
        right[owned] = 1
        for box in (interior, *boxes.outside(owned, interior)):
            counts[box] += 1
        assert np.array_equal(counts, right)
        allowed = np.zeros(shape, bool)
        allowed[inner] = True
        assert allowed[interior].all()
        begin, end = interior[-1].start, interior[-1].stop
        assert begin == inner[-1].start or (begin - 1) % cells == 0 or begin == end
        assert end == inner[-1].stop or (end - 1) % cells == 0 or begin == end

"""Distributions without ranks: cells that are missing, or that two ranks have."""

import itertools

import numpy as np
import pytest

from mpishare.memory.memory import compact_strides
from mpishare.plans.cells import Box
from mpishare.plans.layout import FieldLayout
from mpishare.redistribution.distribution import require_covered, require_disjoint, spread
from mpishare.redistribution.plan import _sides


def test_the_first_cells_that_are_missing_are_named():
    """Against a mask, over all boxes of a small array."""
    wanted = Box((0, 0), (3, 3))
    ends = [*itertools.combinations(range(4), 2)]
    boxes = [Box((a, c), (b, d)) for a, b in ends for c, d in ends]
    for first, second in itertools.combinations(boxes, 2):
        if (first & second).size:
            with pytest.raises(ValueError, match="both have"):
                require_disjoint("source", [first, second], "")
            continue
        there = np.zeros((3, 3), bool)
        there[first.slices] = there[second.slices] = True
        if there.all():
            require_covered([wanted], [first, second], "rank {rank} wants {box}!")
            continue
        with pytest.raises(ValueError, match="rank 0 wants Box") as caught:
            require_covered([wanted], [first, second], "rank {rank} wants {box}!")
        text = str(caught.value).removeprefix("rank 0 wants ").removesuffix("!")
        missing = eval(text, {"Box": Box})  # its repr
        assert missing.size
        assert not there[missing.slices].any()


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 1, 0)])
def test_arrays_of_a_permuted_target_are_known_as_users_pass_them(order):
    """Replays on GPUs compare them with this layout, and engines get the view of their cells."""
    part = (2, 3, 4)
    layout = FieldLayout(part, compact_strides(part, 8, order), np.dtype("f8"), 0)
    _, target = _sides(order, [layout, layout])
    array = np.empty(target.shape)
    assert (target.given.shape, target.given.strides) == (array.shape, array.strides)
    cells = target.as_cells(array)
    assert (cells.shape, cells.strides) == (part, layout.strides)


def test_a_box_whose_corners_are_in_the_wrong_order_is_told_the_order():
    with pytest.raises(ValueError, match="give 0 <= lower <= upper <= extent"):
        spread("source", Box((4, 0), (2, 4)), (4, 4), 0, 1)

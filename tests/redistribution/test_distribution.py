"""Distributions without ranks: cells that are missing, or that two ranks have."""

import itertools

import numpy as np
import pytest

from mpishare.plans.cells import Box
from mpishare.redistribution.distribution import require_covered, require_disjoint, spread


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


def test_a_box_whose_corners_are_in_the_wrong_order_is_told_the_order():
    with pytest.raises(ValueError, match="give 0 <= lower <= upper <= extent"):
        spread("source", Box((4, 0), (2, 4)), (4, 4), 0, 1)

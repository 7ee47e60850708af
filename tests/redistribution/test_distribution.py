"""Distributions without ranks: parts as NumPy cuts them, and cells that are missing."""

import itertools

import numpy as np
import pytest

from mpishare.memory.memory import compact_strides
from mpishare.plans.cells import Box
from mpishare.plans.layout import FieldLayout
from mpishare.redistribution.distribution import OnRank, box_of, require_covered, require_disjoint
from mpishare.redistribution.plan import _sides


@pytest.mark.parametrize("shape", [(7, 5), (1, 9), (0, 4), (6, 6)])
@pytest.mark.parametrize("parts", [(1, 4), (2, 3), (5, 1), (1, 1)])
def test_parts_are_those_of_array_split(shape, parts):
    whole = np.arange(shape[0] * shape[1]).reshape(shape)
    size = parts[0] * parts[1]
    cut = [
        block
        for rows in np.array_split(whole, parts[0], axis=0)
        for block in np.array_split(rows, parts[1], axis=1)
    ]
    for rank in range(size):
        box = box_of("source", parts, shape, rank, size)
        assert (whole[box.slices] == cut[rank]).all()
        assert box.shape == cut[rank].shape


def test_one_axis_counts_from_either_end():
    assert box_of("source", -1, (4, 6), 1, 3) == box_of("source", (1, 3), (4, 6), 1, 3)
    assert box_of("source", OnRank(1), (4, 6), 0, 3).shape == (0, 0)


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

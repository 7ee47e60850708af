"""The axes of a block, for plans that take any fields of it."""

import pytest

from mpishare.halo.geometry import fields_of_block, normalize_axes, normalize_block_axes


@pytest.mark.parametrize(
    ("axes", "naxes", "found"),
    [
        (None, 3, (0, 1, 2)),
        ((0, 1), 2, (0, 1)),
        ((1, 0), 2, (1, 0)),
        ((-1, -2), 2, (1, 0)),
        ((2, 5), 2, (0, 1)),
        ((0, -1), 2, (0, 1)),
        (-1, 1, (0,)),
    ],
)
def test_which_axis_of_the_block(axes, naxes, found):
    assert normalize_block_axes(axes, naxes) == found


@pytest.mark.parametrize("axes", [(0,), (0, 0), (0, 1.5), "xy", (0, 99)])
def test_axes_that_are_none(axes):
    with pytest.raises(ValueError, match="axes= must name 2"):
        normalize_block_axes(axes, 2)


@pytest.mark.parametrize("axes", [None, (1, 0), (-2, -1), (1, 3), (-1, -3), (0, -1), 1])
def test_two_fields_stand_for_all(axes):
    extents = (4,) if axes == 1 else (4, 5)
    cut, shapes = fields_of_block(extents, axes)
    assert len(shapes[1]) == len(shapes[0]) + 1
    for own, shape in zip(cut, shapes, strict=True):
        assert tuple(shape[axis] for axis in own) == extents


def test_a_field_of_fewer_axes_is_told_of_them_not_of_the_argument():
    with pytest.raises(ValueError, match=r"the cart cuts 2 axes, the field has 1$"):
        normalize_axes((0, 1), 2, 1)

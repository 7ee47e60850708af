"""Boxes of fields with different axes, and the examples of docstrings."""

import doctest

import numpy as np
import pytest

import mpishare


def test_fields_with_different_axes(node):
    """Boxes counted from the last axis fit both; so must the axis that is moved."""
    fields = [node.xp.zeros((2, 6)), node.xp.zeros(6)]
    with mpishare.HaloExchange(node.comm, fields, 1, axes=-1, dims=(node.size,), node=node) as halo:
        assert halo.shifted(halo.owned, -1, -1) == (..., slice(0, 4))
        assert halo.owned is halo.owned  # programs read the boxes at each step
        assert halo.interior is halo.interior
        assert halo.shell is halo.shell
        with pytest.raises(ValueError, match="axis"):
            halo.shifted(halo.owned, 0, -1)


@pytest.mark.parametrize(
    ("item", "examples"),
    [
        (mpishare.HaloExchange, 5),
        (mpishare.HaloExchange.shifted, 6),
        (mpishare.HaloExchange.of, 6),
        (mpishare.NeighborExchange.from_global_ids, 7),
        (mpishare.Layout, 12),
    ],
)
def test_the_example_of_a_docstring(item, examples):
    finder = doctest.DocTestFinder(recurse=False)
    (found,) = finder.find(item, item.__name__, globs=vars(mpishare) | {"numpy": np})
    assert doctest.DocTestRunner().run(found) == (0, examples)

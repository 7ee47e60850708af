"""Stencils on the boxes of a halo: owned, interior and shell, moved by some cells."""

import doctest

import numpy as np
import pytest
from mpi4py import MPI

import mpishare
from tests.helpers.halos import on_host


def split(node, whole, axes, dims, width):
    """This rank's part of a global array, cut along `axes`, with ghosts that hold poison."""
    coords = np.unravel_index(node.rank, dims)
    cuts = [slice(None)] * whole.ndim
    pads = [(0, 0)] * whole.ndim
    for axis, coord, n in zip(axes, coords, dims, strict=True):
        cells = whole.shape[axis] // n
        cuts[axis] = slice(cells * coord, cells * (coord + 1))
        pads[axis] = (width, width)
    return tuple(cuts), node.xp.asarray(np.pad(whole[tuple(cuts)], pads, constant_values=-1e9))


@pytest.mark.parametrize(
    ("axes", "others"), [((0, 1), ()), ((1, 0), ()), ((-2, -1), (3,)), ((0, 2), (3,))]
)
def test_a_stencil_of_two_cells_each_way(node, axes, others):
    """On the interior between start and wait, on the shell after it: as `numpy.roll` on the whole.

    `axis` counts the axes of the fields, and cells along the others are moved too.
    """
    dims = tuple(MPI.Compute_dims(node.size, 2))
    places = [axis % (2 + len(others)) for axis in axes]
    shape = [*others, *others, 0, 0][: 2 + len(others)]
    for axis in range(len(shape)):
        shape[axis] = 5 * dims[places.index(axis)] if axis in places else others[0]
    whole = np.random.default_rng(1).integers(-50, 50, shape).astype("f8")
    cuts, u = split(node, whole, places, dims, 2)
    with mpishare.HaloExchange(
        node.comm, u, 2, axes=axes, dims=dims, periods=True, node=node
    ) as halo:
        new = node.xp.zeros_like(u)

        def stencil(box):
            for axis in axes:
                for n in (-2, 1):
                    new[box] += (n + 5) * u[halo.shifted(box, axis, n)]

        halo.start(u)
        stencil(halo.interior)
        halo.wait()
        for box in halo.shell:
            stencil(box)
        right = sum((n + 5) * np.roll(whole, -n, axis) for axis in places for n in (-2, 1))
        assert np.array_equal(on_host(new[halo.owned]), right[cuts])
        with pytest.raises(ValueError, match=r"HaloExchange \d+: shifted failed: the box leaves"):
            halo.shifted(halo.owned, axes[0], 3)


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

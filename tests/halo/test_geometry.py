"""Halos as integers, against `numpy.pad` of the global array."""

import doctest
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpishare.halo import geometry
from mpishare.halo.geometry import Block, Grid
from tests.helpers import halos
from tests.helpers.halos import POISON

unhurried = settings(deadline=None)  # the machine may be busy


class Case(NamedTuple):
    """Blocks of a grid, which a test may change, and what they must hold after an exchange."""

    grid: Grid
    blocks: list[Block]
    corners: bool
    right: halos.Case


def case_of(right):
    blocks = [Block(*each) for each in zip(right.extents, right.widths, strict=True)]
    return Case(Grid(right.dims, right.periods), blocks, right.corners, right)


def cases():
    """Any grid, uneven blocks, some without cells, widths that differ from rank to rank."""
    seeds, sizes = st.integers(0, 1 << 32), st.integers(1, 36)
    return st.builds(
        lambda seed, size: case_of(halos.random_case(np.random.default_rng(seed), size)),
        seeds,
        sizes,
    )


def ranks(case):
    return range(len(case.blocks))


def both(case, rank):
    grid = case.grid.of_blocks(case.blocks)
    return geometry.transfers(grid, rank, case.blocks, corners=case.corners)


def check(case):
    geometry.check(case.grid.of_blocks(case.blocks), case.blocks, corners=case.corners)


@unhurried
@given(cases())
def test_every_ghost_holds_its_owners_cell_and_the_others_keep_their_poison(case):
    """Each receive meets the one send of its name, and every ghost is written once at most."""
    arrays, sends, receives = [], {}, []
    for rank, cells in enumerate(case.right.cells):
        owned = case.right.owned(rank)
        arrays.append(np.full_like(cells, POISON))
        arrays[rank][owned] = cells[owned]
        sent, received = both(case, rank)
        sends |= {(each.direction, each.sender, each.receiver): each for each in sent}
        receives += received
    before = [array.copy() for array in arrays]
    for mine in receives:
        theirs = sends.pop((mine.direction, mine.sender, mine.receiver))
        ghosts = arrays[mine.receiver][mine.target.slices]
        assert (ghosts == POISON).all()
        ghosts[...] = before[theirs.sender][theirs.source.slices]
    assert not sends
    assert all(map(np.array_equal, arrays, case.right.cells))


def near(block, received):
    """The owned cells as near to the ghosts of a transfer as these are wide."""
    box, owned = received.target, block.owned
    spans = zip(received.direction, box.lower, box.upper, owned.lower, owned.upper, strict=True)
    return tuple(
        slice(max(low - step * (high - low), first), min(high - step * (high - low), end))
        for step, low, high, first, end in spans
    )


@unhurried
@given(cases())
def test_the_interior_is_what_needs_no_neighbor_and_the_shell_is_the_rest(case):
    for rank in ranks(case):
        block, (sent, received) = case.blocks[rank], both(case, rank)
        inner = geometry.interior(block, sent, received)
        outer = block.owned.outside(inner)
        assert all(box.size for box in outer)
        owned, count, is_needed = (np.zeros(block.shape, int) for _ in range(3))
        owned[block.owned.slices] = 1
        for box in (inner, *outer):
            count[box.slices] += 1
        for key in (*(each.source.slices for each in sent), *(near(block, r) for r in received)):
            is_needed[key] = 1
        assert np.array_equal(count, owned)
        assert not is_needed[inner.slices].any()
        if not case.corners or len({*case.right.widths}) == 1:
            assert inner.size == (owned - owned * is_needed).sum()


@pytest.mark.parametrize(
    ("width", "found"),
    [
        (0, ((0, 0),)),
        (2, ((2, 2),) * 3),
        (np.int64(2), ((2, 2),)),
        (np.array(2), ((2, 2),) * 2),
        (np.array([1, 2]), ((1, 1), (2, 2))),
        (np.array([[1, 2], [3, 4]]), ((1, 2), (3, 4))),
        ((1, 0), ((1, 1), (0, 0))),
        ((1, 0), ((1, 0),)),
        ([[1, 0]], ((1, 0),)),
        ([3], ((3, 3),)),
        ([1, (0, 2)], ((1, 1), (0, 2))),
        (((0, 0), (1, 2), (0, 3)), ((0, 0), (1, 2), (0, 3))),
    ],
)
def test_widths(width, found):
    (widths,) = geometry.normalize_widths(width, len(found))
    assert widths == found
    assert geometry.normalize_widths(width, len(found), nfields=len(found)) == [found]
    assert all(type(cells) is int for pair in widths for cells in pair)


@pytest.mark.parametrize(
    ("width", "found"),
    [
        ([1, ((1, 2), 1)], [((1, 1), (1, 1)), ((1, 2), (1, 1))]),
        ((((1, 2), 1), (1, (1, 2))), [((1, 2), (1, 1)), ((1, 1), (1, 2))]),
        ([1, (1, 2)], [((1, 1),), ((1, 2),)]),
        ([(2, 1), 0], [((2, 1),), ((0, 0),)]),
        ([0, 1, 2], [((0, 0), (0, 0)), ((1, 1), (1, 1)), ((2, 2), (2, 2))]),
        ([((1, 0), (0, 1))], [((1, 0), (0, 1))]),
        (np.arange(8).reshape(2, 2, 2), [((0, 1), (2, 3)), ((4, 5), (6, 7))]),
    ],
)
def test_widths_of_each_field(width, found):
    assert geometry.normalize_widths(width, len(found[0]), len(found)) == found


@pytest.mark.parametrize(
    ("axes", "ndim", "found"),
    [
        (None, 3, (0, 1, 2)),
        ((-2, -1), 4, (2, 3)),
        ((2, 0), 3, (2, 0)),
        ([np.int32(-1)], 2, (1,)),
        (0, 2, (0,)),
    ],
)
def test_axes(axes, ndim, found):
    assert geometry.normalize_axes(axes, len(found), ndim) == found


@pytest.mark.parametrize(
    ("axes", "found"),
    [
        (None, (0, 1, 2)),
        ((0, 1), (0, 1)),
        ((1, 0), (1, 0)),
        ((-1, -2), (1, 0)),
        ((2, 5), (0, 1)),
        ((0, -1), (0, 1)),
        (-1, (0,)),
    ],
)
def test_which_axis_of_the_block(axes, found):
    assert geometry.normalize_block_axes(axes, len(found), (9,) * len(found)) == found


def test_a_field_of_fewer_axes_or_without_room_for_its_ghosts_is_refused():
    with pytest.raises(ValueError, match=r"the cart cuts 2 axes, the field has 1$"):
        geometry.normalize_axes((0, 1), 2, 1)
    widths = ((1, 1), (3, 2))
    assert Block.of((2, 7, 5), widths, (0, 2)).extents == (0, 0)
    with pytest.raises(ValueError, match=r"axis 2 .* \(2, 7, 4\) has 4 cells, .* 3 \+ 2 ghosts"):
        Block.of((2, 7, 4), widths, (0, 2))


def told(case):
    """The error on each rank that has one, and the one that `check` tells all."""
    texts = {}
    for rank in ranks(case):
        try:
            both(case, rank)
        except ValueError as error:
            texts[rank] = str(error)
    with pytest.raises(ValueError, match="rank") as caught:
        check(case)
    return texts, str(caught.value)


def test_one_rank_of_a_row_without_cells_is_not_passed_over():
    """Its block is no block of a grid."""
    case = case_of(halos.even_case((3, 2), True, 4, ((1, 1), (0, 0))))
    case.blocks[2] = Block((0, 4), case.blocks[2].widths)
    texts, text = told(case)
    assert text in texts.values()
    assert "rank 2, which owns 0" in text
    assert "from_global_ids" in text


@unhurried
@given(cases(), st.data())
def test_check_raises_where_any_rank_does(case, data):
    rank = data.draw(st.sampled_from(ranks(case)))
    block = case.blocks[rank]
    axis = data.draw(st.integers(0, len(block.extents) - 1))
    extents = list(block.extents)
    extents[axis] = data.draw(st.integers(0, 5))
    case.blocks[rank] = Block(tuple(extents), block.widths)
    try:
        check(case)
    except ValueError:
        texts, text = told(case)
        assert text in texts.values()
    else:
        for each in ranks(case):
            both(case, each)


def test_the_examples_hold():
    assert doctest.testmod(geometry) == (0, 4)


@st.composite
def boxes(draw):
    """Fields' shape, a box in it, an axis from the last or the first, how far it is moved."""
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    spans = [
        sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True)))
        for n in shape
    ]
    steps = [draw(st.sampled_from([None, 1, 2, 3])) for _ in shape]
    box = [slice(*span, step) for span, step in zip(spans, steps, strict=True)]
    named = draw(st.integers(0, len(shape)))  # the other axes are whole
    box = [..., *box[named:]] if draw(st.booleans()) else box[:named]
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    return tuple(shape), tuple(box), axis, draw(st.integers(-8, 8))


def cells_of(index, fields):
    """The coordinates of the cells of an index, and how many it has along each axis."""
    index = index if index[:1] == (...,) else (*index, ...)
    found = np.moveaxis(np.indices(fields), 0, -1)[(*index, slice(None))]
    return found.reshape(-1, len(fields)), found.shape


@settings(deadline=None, max_examples=200)
@given(boxes())
def test_a_moved_box_has_the_cells_beside_those_of_the_box(case):
    fields, box, axis, n = case
    cells, extents = cells_of(box, fields)
    cells[:, axis] += n
    if (cells < 0).any() or (cells >= fields).any():
        with pytest.raises(ValueError, match="leaves the field"):
            geometry.shifted(box, axis, n, [fields])
    else:
        moved, found = cells_of(geometry.shifted(box, axis, n, [fields]), fields)
        assert found == extents
        assert np.array_equal(moved, cells)


@pytest.mark.parametrize(
    ("box", "axis", "found"),
    [
        ((slice(1, 3),), 0, (slice(2, 4),)),
        ((slice(1, 3),), 1, "leaves the field"),
        ((slice(1, 3), slice(1, 3)), 1, (slice(1, 3), slice(2, 4))),
        ((slice(1, 3),), -1, "from the first"),
        ((..., slice(1, 3)), -1, (..., slice(2, 4))),
        ((..., slice(1, 3)), 0, "from the last"),
        ((..., slice(1, 3)), -2, "leaves the field"),
    ],
)
def test_fields_with_different_axes(box, axis, found):
    """The axis must be the same in all of them, as the box counts."""
    shapes = [(5, 5), (5, 5, 5)]
    if isinstance(found, str):
        with pytest.raises(ValueError, match=found):
            geometry.shifted(box, axis, 1, shapes)
    else:
        assert geometry.shifted(box, axis, 1, shapes) == found


@pytest.mark.parametrize(
    ("kind", "box", "axis", "n"),
    [
        *((TypeError, box, 0, 1) for box in (slice(1, 3), (1, slice(1, 3)), (slice(1, 3), ...))),
        (TypeError, (slice(1, 3),), 0.5, 1),
        (TypeError, (slice(1, 3),), 0, 1.0),
        (ValueError, (slice(1, 3),), 2, 1),
        (ValueError, (slice(1, 3),), -3, 1),
        (ValueError, (slice(3, 1, -1),), 0, 1),
    ],
)
def test_boxes_that_are_none(kind, box, axis, n):
    with pytest.raises(kind) as caught:
        geometry.shifted(box, axis, n, [(5, 5)])
    assert axis != 2 or "fields with [2] axes have no axis 2" in str(caught.value)

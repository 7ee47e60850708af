"""Which parts of a field on the host are read where they are, and which are packed."""

import numpy as np
import pytest

from mpishare.plans.cells import Box
from mpishare.plans.exchange.host import parts
from mpishare.plans.exchange.host.parts import (
    extent_of,
    is_read_from_process,
    is_read_in_place,
    run_nbytes,
)
from mpishare.plans.layout import host_layout
from mpishare.plans.message import Part

SHAPE = (40, 300, 500)  # of doubles
PLANE, ROW, CELL = (
    Box((1, 0, 0), (2, 300, 500)),
    Box((0, 1, 0), (40, 2, 500)),
    Box((0, 0, 1), (40, 300, 2)),
)
INNER = Box((1, 1, 1), (2, 299, 499))  # a plane without its ghosts


def layout_of(order):
    return host_layout(np.empty(SHAPE if order == "C" else SHAPE[::-1], order=order), "field")


def box_of(box, order):
    return box if order == "C" else Box(box.lower[::-1], box.upper[::-1])


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize(
    ("box", "run", "spread"),
    [
        (PLANE, 300 * 500 * 8, 300 * 500 * 8),
        (ROW, 500 * 8, (39 * 300 * 500 + 500) * 8),
        (CELL, 8, ((40 * 300 - 1) * 500 + 1) * 8),
        (INNER, 498 * 8, (297 * 500 + 498) * 8),
        (Box((3, 4, 5), (4, 5, 6)), 8, 8),
        (Box((3, 4, 5), (5, 5, 6)), 8, (300 * 500 + 1) * 8),
        (Box((0, 0, 0), SHAPE), 40 * 300 * 500 * 8, 40 * 300 * 500 * 8),
    ],
)
def test_where_the_cells_of_a_box_lie(box, run, spread, order):
    layout = layout_of(order)
    assert run_nbytes(layout, box_of(box, order)) == run
    assert extent_of(layout, box_of(box, order)).nbytes == spread


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize(
    ("box", "in_place", "from_process"),
    [(PLANE, True, True), (INNER, True, True), (ROW, True, False), (CELL, False, False)],
)
def test_the_way_of_a_face(monkeypatch, box, in_place, from_process, order):
    monkeypatch.setattr(parts, "_MIN_READ_NBYTES", 1 << 20)
    layout = layout_of(order)
    part = Part.of_box(0, layout, box_of(box, order))
    assert is_read_in_place(layout, part) == in_place
    assert is_read_from_process(layout, part) == from_process


@pytest.mark.parametrize("order", ["C", "F"])
def test_the_least_run_with_wide_gaps_that_is_read_from_the_process(order):
    """Half of each plane; the rest of it is not read."""
    rows = parts._MIN_READ_RUN_NBYTES // (500 * 8) + 1
    layout = layout_of(order)
    for count, is_read in ((rows, True), (rows - 1, False)):
        box = box_of(Box((0, 1, 0), (40, 1 + count, 500)), order)
        part = Part.of_box(0, layout, box)
        assert is_read_from_process(layout, part) == is_read
    assert not parts.has_few_gaps(layout, box)


def test_the_largest_number_of_runs_that_are_read_from_the_process():
    """Each is made ready by itself when the plan is made."""
    most = parts._MAX_READ_RUNS
    layout = host_layout(np.empty((most + 1, 2, parts._MIN_READ_RUN_NBYTES // 8)), "field")
    _, halves, cells = layout.shape
    for count, is_read in ((most, True), (most + 1, False)):
        part = Part.of_box(0, layout, Box((0, 0, 0), (count, halves - 1, cells)))
        assert is_read_from_process(layout, part) == is_read


@pytest.mark.parametrize(
    ("places", "is_read"),
    [
        (np.arange(5, 5 + (1 << 19)), True),
        (slice(5, 5 + (1 << 19), 1), True),
        (np.arange(0, 1 << 20, 2), False),
        (np.arange(1 << 19)[::-1], False),
        (np.r_[1, 0, 2 : 1 << 19], False),
    ],
    ids=["together", "a slice", "in steps", "backwards", "scattered"],
)
def test_places_that_follow_each_other_are_a_box(places, is_read):
    """Others are packed."""
    layout = host_layout(np.empty((1 << 20, 2)), "field")
    part = Part.of_indices(0, layout, 0, places)
    assert part.shape == (1 << 19, 2)
    assert part.nbytes == 8 << 20
    assert is_read_in_place(layout, part) == is_read
    assert is_read_from_process(layout, part) == is_read


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([], slice(0, 0, 1)),
        ([3], slice(3, 4, 1)),
        ([3, 4], slice(3, 5, 1)),
        ([1, 4, 7], slice(1, 8, 3)),
        ([1, 4, 8], None),
        ([4, 1], None),
        ([2, 2], None),
    ],
)
def test_the_simplest_index_of_places(places, expected):
    """Steps upwards are a slice; all else stays as it is."""
    layout = host_layout(np.empty((4, 9)), "field")
    part = Part.of_indices(0, layout, 1, np.array(places, np.int64))
    assert part.key[0] == slice(0, 4)
    if expected is None:
        assert part.key[1].tolist() == part.indices.tolist() == places
    else:
        assert part.key[1].indices(9) == expected.indices(9)
        assert part.indices is None
    assert part.shape == (4, len(places))

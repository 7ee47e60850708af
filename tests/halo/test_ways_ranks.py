"""The ways of a face between host fields: packed, or read where it is when its receiver waits."""

from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest

import mpishare
from mpishare.plans.exchange.host import parts, process_read
from tests.helpers.rings import beside, ring

pytestmark = pytest.mark.ranks(min=2)
LIMITS = {"_MIN_IN_PLACE_NBYTES": 1024, "_MIN_RUN_NBYTES": 64, "_MIN_READ_NBYTES": 4096}
LATER = -2.0


def faces_of(node, shape, axis, width, kind, limits=LIMITS):
    """Exchange faces whose cells change between start and wait, and return what came at either end.

    That is not allowed, but shows who reads what: a face that is read where it is has `LATER`.
    """
    fields = [np.empty(shape) for _ in range(3)]
    if kind == "window":
        fields = [node.allocate_each(shape).array for _ in range(3)]
    found = set()
    with mock.patch.multiple(parts, **limits), ring(node, fields[0], width, axes=(axis,)) as halo:
        for step in range(4):
            field = fields[step % 3] if kind != "new" else np.empty(shape)
            field[...] = 100 * step + node.rank
            node.comm.Barrier()
            halo.start(field)
            node.comm.Barrier()
            field[...] = LATER
            node.comm.Barrier()
            halo.wait()
            rows = np.moveaxis(field, axis, 0)
            low, high = halo.block.widths[0]
            for cells, other in zip(
                (rows[:low], rows[len(rows) - high :]), beside(node), strict=True
            ):
                values = {*np.unique(cells).tolist()}
                assert values in ({LATER}, {100.0 * step + other})
                found.add((len(cells), "read" if values == {LATER} else "packed"))
    return set().union(*node.comm.allgather(found))


@pytest.mark.parametrize(
    ("shape", "axis", "width", "of_window", "of_private"),
    [
        ((6, 127), 0, 1, "packed", "packed"),
        ((6, 128), 0, 1, "read", "packed"),
        ((6, 511), 0, 1, "read", "packed"),
        ((6, 512), 0, 1, "read", "read"),
        ((2000, 60), 1, 7, "packed", "packed"),
        ((2000, 60), 1, 8, "read", "packed"),
        ((15, 60), 1, 8, "packed", "packed"),
    ],
)
@pytest.mark.parametrize("kind", ["window", "private", "new"])
def test_the_way_of_a_face(compiled_node, shape, axis, width, of_window, of_private, kind):
    """By its size, and by how its cells lie; arrays that are new at a call make no difference."""
    found = faces_of(compiled_node, shape, axis, width, kind)
    assert found == {(width, of_window if kind == "window" else of_private)}


def test_a_packed_face_beside_one_that_is_read_in_place(compiled_node):
    """Of one field: one column of cells to one side, eight to the other."""
    found = faces_of(compiled_node, (2000, 60), 1, ((1, 8),), "window")
    assert found == {(1, "packed"), (8, "read")}


@pytest.mark.parametrize(
    ("cells", "nbytes_cached", "way"),
    [(128, 2 * 1024 - 1, "read"), (128, 2 * 1024, "packed"), (127, 1024, "packed")],
)
def test_smaller_faces_are_read_where_many_are_packed(compiled_node, cells, nbytes_cached, way):
    """A quarter of the size from which they are read else."""
    limits = {**LIMITS, "_MAX_CACHED_NBYTES": nbytes_cached, "_MIN_IN_PLACE_NBYTES": 1 << 20}
    assert faces_of(compiled_node, (6, cells), 0, 1, "private", limits) == {(1, way)}


@contextmanager
def from_rank_0_to_all(node, count, most_readers=4):
    """A redistribution of so many doubles, with small limits."""
    whole = mpishare.Box((0,), (count if node.rank else 0,))
    with (
        mock.patch.multiple(parts, **LIMITS),
        mock.patch.object(process_read, "_MAX_READERS", most_readers),
        mpishare.Redistribute(node.comm, (count,), mpishare.OnRank(0), whole, node=node) as plan,
    ):
        yield plan


@pytest.mark.parametrize(("count", "most_readers"), [(3500, 0), (3500, 4), (100, 4)])
def test_cells_for_several_ranks_are_packed_once(compiled_node, count, most_readers):
    """Many readers at a time, or few cells; else they are read where they are."""
    node = compiled_node
    with from_rank_0_to_all(node, count, most_readers) as plan:
        for step in range(5):
            mine = np.arange(step, step + (count if node.rank == 0 else 0), dtype=float)
            out = np.full(plan.target_shape, -1.0)
            plan.forward(mine, out=out)
            assert (out == np.arange(step, step + count)[: out.size]).all()
        is_packed = count == 100 or not most_readers
        nbytes = 2 * 8 * count * is_packed  # for one receiver, in even epochs and in odd ones
        assert nbytes <= plan.staging_nbytes < nbytes + 10_000

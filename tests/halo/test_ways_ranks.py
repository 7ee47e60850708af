"""The three ways of a face between host fields: packed, read in place, read from the process."""

from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest

import mpishare
from mpishare.plans.exchange.host import parts, process_read
from tests.helpers.halos import beside, ring

TWO = pytest.mark.ranks(min=2)
LIMITS = {"_MIN_IN_PLACE_NBYTES": 1024, "_MIN_RUN_NBYTES": 64, "_MIN_READ_NBYTES": 4096}


def ways_of(route, in_window):
    """The way of each part that this rank sends, as the last exchange left it in staging."""
    found = []
    for part in route._parts.outgoing:
        if part.buffers is None:
            found.append("read in place" if in_window else "read from the process")
        else:
            is_packed = any((buffer >= 0).any() for buffer in part.buffers)
            found.append("packed" if is_packed else "read in place")
    return found


def exchange(node, shape, axis, width, in_window, is_new, steps=4, limits=LIMITS):
    """Exchange faces, check the ghosts, and return the ways that all parts of all ranks took."""
    field = node.allocate_each(shape).array if in_window else np.empty(shape)
    low, high = beside(node)
    with (
        mock.patch.multiple(parts, **limits),
        ring(node, field, width, axes=(axis,)) as halo,
    ):
        route = halo._forward._host
        ways = set()
        for step in range(steps):
            for part in route._parts.outgoing:
                for buffer in part.buffers or ():
                    buffer[...] = -1
            if is_new:
                field = field.copy()
            cells = np.moveaxis(field, axis, 0)
            cells[...] = 100 * step + node.rank
            node.comm.Barrier()
            halo.exchange(field)
            assert (cells[:width] == 100 * step + low).all()
            assert (cells[-width:] == 100 * step + high).all()
            assert (cells[width:-width] == 100 * step + node.rank).all()
            node.comm.Barrier()
            ways.update(ways_of(route, in_window))
    return set().union(*node.comm.allgather(ways))


@TWO
@pytest.mark.parametrize(
    ("shape", "axis", "width", "of_window", "of_private"),
    [
        ((6, 127), 0, 1, "packed", "packed"),
        ((6, 128), 0, 1, "read in place", "packed"),
        ((6, 511), 0, 1, "read in place", "packed"),
        ((6, 512), 0, 1, "read in place", "read from the process"),
        ((2000, 20), 1, 1, "packed", "packed"),
        ((2000, 60), 1, 7, "packed", "packed"),
        ((2000, 60), 1, 8, "read in place", "packed"),
        ((15, 60), 1, 8, "packed", "packed"),
    ],
)
@pytest.mark.parametrize("kind", ["window", "private", "new"])
def test_the_way_of_a_face(compiled_node, shape, axis, width, of_window, of_private, kind):
    found = exchange(compiled_node, shape, axis, width, kind == "window", kind == "new")
    assert found == {of_window if kind == "window" else of_private}


@TWO
@pytest.mark.parametrize(
    ("shape", "nbytes_cached", "of_private"),
    [
        ((6, 128), 2 * 1024 - 1, "read from the process"),
        ((6, 128), 2 * 1024, "packed"),
        ((6, 127), 1024, "packed"),
    ],
)
@pytest.mark.parametrize("kind", ["window", "private"])
def test_smaller_faces_are_read_where_many_are_packed(
    compiled_node, shape, nbytes_cached, of_private, kind
):
    """A quarter of the size from which they are read else."""
    limits = {**LIMITS, "_MAX_CACHED_NBYTES": nbytes_cached, "_MIN_IN_PLACE_NBYTES": 1 << 20}
    found = exchange(compiled_node, shape, 0, 1, kind == "window", is_new=False, limits=limits)
    of_window = "packed" if of_private == "packed" else "read in place"
    assert found == {of_window if kind == "window" else of_private}


@TWO
@pytest.mark.parametrize("is_new", [False, True])
def test_a_packed_face_beside_one_that_is_read_in_place(compiled_node, is_new):
    """Of one field in a window: one column of cells to one side, eight to the other."""
    node = compiled_node
    low, _ = beside(node)
    windows = [node.allocate_each((2000, 60)).array for _ in range(2)]
    with (
        mock.patch.multiple(parts, **LIMITS),
        ring(node, windows[0], ((1, 8),), axes=(1,)) as halo,
    ):
        route = halo._forward._host
        assert sorted(part.in_place for part in route._parts.outgoing) == [False, True]
        for step in range(4):
            field = windows[step % 2]
            field = field[...] if is_new else field
            for part in route._parts.outgoing:
                for buffer in part.buffers:
                    buffer[...] = -1
            field[...] = 100 * step + node.rank
            node.comm.Barrier()
            halo.start(field)
            node.comm.Barrier()
            field[...] = -2  # not allowed, but shows who reads what: the ghosts are -2, too
            node.comm.Barrier()
            halo.wait()
            assert (field[:, :1] == 100 * step + low).all()
            assert (field[:, -8:] == -2).all()
            node.comm.Barrier()
            assert ways_of(route, True) == [
                "read in place" if part.in_place else "packed" for part in route._parts.outgoing
            ]


@TWO
def test_only_those_who_read_are_waited_for(compiled_node):
    """A rank that finds my cells in staging may copy them long after my `wait`."""
    node = compiled_node
    field = node.allocate_each((200, 200)).array
    with (
        mock.patch.multiple(parts, **LIMITS),
        ring(node, field, dims=(1, node.size)) as halo,
    ):
        assert not halo._forward._host._parts.readers
        assert len(halo._forward._host._receivers) == min(node.size - 1, 2)


@contextmanager
def from_rank_0_to_all(node, count, most_readers=4):
    """A redistribution of so many doubles, with small limits, and its route."""
    whole = mpishare.Box((0,), (count if node.rank else 0,))
    with (
        mock.patch.multiple(parts, **LIMITS),
        mock.patch.object(process_read, "_MAX_READERS", most_readers),
        mpishare.Redistribute(node.comm, (count,), mpishare.OnRank(0), whole, node=node) as plan,
    ):
        yield plan, plan._forward.engine._host


@TWO
@pytest.mark.parametrize(("most_readers", "is_packed"), [(0, True), (4, False)])
def test_cells_that_many_read_are_packed(compiled_node, most_readers, is_packed):
    node, count = compiled_node, 4096
    with from_rank_0_to_all(node, count, most_readers) as (plan, route):
        for step in range(5):
            mine = np.arange(step, step + (count if node.rank == 0 else 0), dtype=float)
            out = np.full(plan.target_shape, -1.0)
            plan.forward(mine, out=out)
            assert (out == np.arange(step, step + count)[: out.size]).all()
        assert [part.buffers is not None for part in route._parts.outgoing] == [is_packed] * (
            node.rank == 0
        )


@pytest.mark.ranks(min=3)
def test_cells_for_several_ranks_are_packed_once(compiled_node):
    node, count = compiled_node, 100
    with from_rank_0_to_all(node, count) as (plan, route):
        out = np.empty(plan.target_shape)
        plan.forward(np.arange(float(count))[: count if node.rank == 0 else 0], out=out)
        assert (out == np.arange(count)[: out.size]).all()
        assert len(route._parts.outgoing) == (node.rank == 0)
        assert route.staging_nbytes < 2 * 2 * 8 * count + 8192  # for one receiver, and words


@pytest.mark.ranks(min=3)
def test_ranks_begin_to_read_at_different_senders(compiled_node):
    node = compiled_node
    with mpishare.Redistribute(node.comm, (node.size,), 0, None, node=node) as plan:
        senders = [each.rank for each in plan._forward.engine._host._parts.senders]
    assert senders == [(node.rank + n) % node.size for n in range(node.size)]

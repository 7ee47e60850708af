"""What kernels are told, without a GPU: where units of a part are, and where they lie packed."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpishare.errors import UnsupportedError
from mpishare.halo.cuda.staging import pinned_of, slab_of
from mpishare.halo.cuda.work_items import AXES, ITEM, PACK, UNPACK, StridedCells, WorkList, chunks
from mpishare.halo.geometry import Box
from mpishare.halo.layout import Layout
from mpishare.halo.message import Part

DTYPES = ("i1", "f2", "f4", "f8", "c16", "V3", "V12")


@st.composite
def fields(draw):
    """A field in any order of its axes, maybe a view of every second element, and its memory."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(shape))))
    step = draw(st.integers(1, 2))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    whole = np.zeros([shape[axis] * step for axis in order], dtype)
    whole.view("u1").reshape(-1)[:] = np.arange(whole.nbytes) % 251
    array = whole[(slice(None, None, step),) * len(shape)].transpose(np.argsort(order))
    assert list(array.shape) == shape
    return array, whole.view("u1").reshape(-1)


def layout_of(array):
    return Layout(array.shape, array.strides, array.dtype, 0)


def packed(part, layout, memory, most):
    """The bytes in the order in which a kernel takes them, as place_of in cells.cuh finds them."""
    cells = StridedCells.of(part, layout, most)
    taken = []
    for place in itertools.product(*map(range, cells.extents)):
        at = cells.first
        for axis, (here, step) in enumerate(zip(place, cells.steps, strict=True)):
            at += step * int(part.indices[here] if axis == cells.along else here)
        assert at % cells.unit == 0
        taken.append(memory[at : at + cells.unit].tobytes())
    return b"".join(taken), cells


@given(fields(), st.data(), st.sampled_from((1, 4, 16)))
def test_a_box_is_taken_cell_by_cell(field, data, most):
    array, memory = field
    start = [data.draw(st.integers(0, n - 1)) for n in array.shape]
    stop = [data.draw(st.integers(s + 1, n)) for s, n in zip(start, array.shape, strict=True)]
    layout = layout_of(array)
    part = Part.of_box(0, layout, Box(tuple(start), tuple(stop)))
    found, cells = packed(part, layout, memory, most)
    assert found == array[part.key].tobytes()
    assert cells.unit <= most
    assert part.nbytes == len(found)


@given(fields(), st.data())
def test_places_are_taken_in_their_order(field, data):
    array, memory = field
    axis = data.draw(st.integers(0, array.ndim - 1))
    places = data.draw(st.lists(st.integers(0, array.shape[axis] - 1), min_size=1, max_size=7))
    layout = layout_of(array)
    part = Part.of_indices(0, layout, axis, np.array(places, np.int64))
    assert packed(part, layout, memory, 16)[0] == array[part.key].tobytes()


def test_a_contiguous_face_is_one_run_of_the_widest_units():
    layout = Layout((6, 8), (64, 8), np.dtype("f8"), 0)
    cells = StridedCells.of(Part.of_box(0, layout, Box((2, 0), (4, 8))), layout, 16)
    assert (cells.extents, cells.steps, cells.unit, cells.first) == ([8], [16], 16, 128)


def test_too_many_axes_are_refused():
    shape = (2,) * (AXES + 1)
    steps = tuple(3**axis for axis in range(AXES + 1))
    layout = Layout(shape, steps, np.dtype("i1"), 0)
    with pytest.raises(UnsupportedError, match="axes"):
        StridedCells.of(Part.of_box(0, layout, Box((0,) * len(shape), shape)), layout, 16)


@given(st.integers(1, 1 << 31), st.booleans())
def test_chunks_make_up_the_whole(nbytes, shares_gpu):
    found = list(chunks(nbytes, shares_gpu=shares_gpu))
    assert len(found) <= 1024
    assert sum(count for _, count in found) == nbytes
    assert all(begin % 16 == 0 for begin, _ in found)
    assert [begin for begin, _ in found[1:]] == [sum(each) for each in found[:-1]]


@pytest.mark.parametrize(("crowded", "count"), [((), 128), ({0}, 32), ({1}, 32), ({2}, 128)])
def test_flags_are_as_many_as_items_where_an_end_shares_its_gpu_too(crowded, count):
    told = [[(1, 0, [(0, 2 << 20, None)], "fused")], []]
    units = {(0, 1, 0, 0): 16}
    routes = [{1: "fused"}, {0: "fused"}]
    flags = slab_of(told, routes, units, range(2), 1, crowded).flags[0, 0, 0]
    loaded = []
    layout = Layout((2 << 17,), (8,), np.dtype("f8"), 0)
    table = WorkList([layout], [16], lambda array: loaded.append(array) or 0)
    part = Part.of_box(0, layout, Box((0,), (2 << 17,)))
    table.move(UNPACK, part, 0, flags=flags, shares_gpu=bool({0, 1} & set(crowded)))
    assert [len(table), len(flags)] == [count, count]


def test_a_slab_has_room_for_each_part_and_a_flag_for_each_item_and_each_silent_neighbor():
    routes = [{1: "fused", 2: "fused"}, {0: "fused"}, {0: "fused"}]
    told = [
        [(1, 0, [(0, 100, None), (1, 10_000, None)], "fused")],
        [(0, 3, [(0, 64, None)], "fused"), (0, 4, [(0, 7, None)], "copy")],
        [],
    ]
    units = {(0, 1, 0, 0): 1, (0, 1, 0, 1): 2, (1, 0, 3, 0): 1}
    first = slab_of(told, routes, units, range(3), 0)
    assert set(first.flags) == {(1, 3, 0), (2, -1, -1)}
    assert set(first.copied) == {(1, 4, 0)}
    second = slab_of(told, routes, units, range(3), 1)
    assert [len(flags) for flags in second.flags.values()] == [1, 3]
    flags = [at for each in second.flags.values() for at in each]
    assert len(set(flags)) == len(flags)
    assert max(flags) < second.flags_nbytes <= second.fused[0, 0, 0]
    assert second.fused[0, 0, 1] >= second.fused[0, 0, 0] + 100
    assert second.fused[0, 0, 1] + 10_000 <= second.fused[0, 0, 0] + second.turn
    assert second.nbytes == second.flags_nbytes + 2 * second.turn


def test_what_travels_as_words_has_twice_the_room_and_no_flag():
    routes = [{1: "fused"}, {0: "fused"}]
    told = [[(1, 0, [(0, 100, None), (1, 200_000, None), (2, 64, None)], "fused")], []]
    units = {(0, 1, 0, 0): 4, (0, 1, 0, 1): 16, (0, 1, 0, 2): 2}
    slab = slab_of(told, routes, units, range(2), 1)
    assert set(slab.flags) == {(0, 0, 1), (0, 0, 2)}  # too large; too narrow
    assert slab.fused[0, 0, 1] >= slab.fused[0, 0, 0] + 200
    # It is heard of by its words, so that it needs no flag that says nothing else.
    assert set(slab_of(told, routes, units, range(2), 0).flags) == {(1, -1, -1)}


def test_what_waits_comes_after_what_it_waits_for_on_all_ranks():
    loaded = []
    layout = Layout((1 << 20,), (8,), np.dtype("f8"), 0)
    part = Part.of_box(0, layout, Box((0,), (1 << 20,)))
    table = WorkList([layout], [16], lambda array: loaded.append(array) or 0)
    flags = list(range(1, 1 + len(list(chunks(part.nbytes, shares_gpu=False)))))
    table.move(UNPACK, part, 0, flags=flags)
    table.move(PACK, part, 0, flags=flags)
    assert table.load() == (0, 2 * len(flags))
    items = [(item[3], item[8]) for item in ITEM.iter_unpack(loaded[-1])]
    pushed = {flag: at for at, (flag, kind) in enumerate(items) if kind == PACK}
    pulled = {flag: at for at, (flag, kind) in enumerate(items) if kind == UNPACK}
    assert all(pushed[flag] < pulled[flag] for flag in flags)
    assert pulled[1] < pushed[flags[-1]]  # and not after all others


def test_pinned_parts_do_not_overlap():
    told = [[(1, 0, [(0, 100, None), (1, 8, None)], "pinned")], [(0, 1, [(0, 5, None)], "pinned")]]
    found, nbytes = pinned_of(told, range(2))
    assert sorted(found.values()) == [0, 112, 128]
    assert nbytes == 144

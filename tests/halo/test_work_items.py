"""Work items, without a GPU: which units a kernel copies, and where they lie packed."""

import itertools
from struct import Struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpishare.errors import UnsupportedError
from mpishare.plans.cells import Box
from mpishare.plans.exchange.cuda.records import (
    AXES,
    GET_LL,
    ITEM_RECORD,
    PACK,
    PART_RECORD,
    PUT_LL,
    UNPACK,
)
from mpishare.plans.exchange.cuda.staging import pinned_layout, silent_key, staging_layout
from mpishare.plans.exchange.cuda.strided import StridedCells
from mpishare.plans.exchange.cuda.work_items import Slot, WorkList, chunks
from mpishare.plans.layout import FieldLayout
from mpishare.plans.message import MessageInfo, Part, PartInfo

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
    return FieldLayout(array.shape, array.strides, array.dtype, 0)


def packed(part, layout, memory, alignment):
    """The bytes in the order of a kernel, found as by offset_of in work_items.cuh."""
    cells = StridedCells.of(part, layout, alignment)
    taken = []
    for place in itertools.product(*map(range, cells.extents)):
        at = cells.first
        for axis, (here, step) in enumerate(zip(place, cells.steps, strict=True)):
            at += step * int(part.indices[here] if axis == cells.along else here)
        assert at % cells.unit == 0
        taken.append(memory[at : at + cells.unit].tobytes())
    return b"".join(taken), cells


@given(fields(), st.data(), st.sampled_from((1, 4, 16)))
def test_a_box_is_packed_cell_by_cell(field, data, alignment):
    array, memory = field
    start = [data.draw(st.integers(0, n - 1)) for n in array.shape]
    stop = [data.draw(st.integers(s + 1, n)) for s, n in zip(start, array.shape, strict=True)]
    layout = layout_of(array)
    part = Part.of_box(0, layout, Box(tuple(start), tuple(stop)))
    found, cells = packed(part, layout, memory, alignment)
    assert found == array[part.key].tobytes()
    assert cells.unit <= alignment
    assert part.nbytes == len(found)


@given(fields(), st.data())
def test_indices_are_packed_in_their_order(field, data):
    array, memory = field
    axis = data.draw(st.integers(0, array.ndim - 1))
    places = data.draw(st.lists(st.integers(0, array.shape[axis] - 1), min_size=1, max_size=7))
    layout = layout_of(array)
    part = Part.of_indices(0, layout, axis, np.array(places, np.int64))
    assert packed(part, layout, memory, 16)[0] == array[part.key].tobytes()


def test_a_contiguous_face_is_one_run_of_the_widest_units():
    layout = FieldLayout((6, 8), (64, 8), np.dtype("f8"), 0)
    cells = StridedCells.of(Part.of_box(0, layout, Box((2, 0), (4, 8))), layout, 16)
    assert (cells.extents, cells.steps, cells.unit, cells.first) == ([8], [16], 16, 128)


def test_too_many_axes_are_refused():
    shape = (2,) * (AXES + 1)
    steps = tuple(3**axis for axis in range(AXES + 1))
    layout = FieldLayout(shape, steps, np.dtype("i1"), 0)
    with pytest.raises(UnsupportedError, match="axes"):
        StridedCells.of(Part.of_box(0, layout, Box((0,) * len(shape), shape)), layout, 16)


@given(st.integers(1, 1 << 30), st.booleans())
def test_chunks_make_up_the_whole(count, shares_gpu):
    layout = FieldLayout((count,), (16,), np.dtype("V16"), 0)
    work = WorkList([layout], [16], lambda array: 0)
    part = Part.of_box(0, layout, Box((0,), (count,)))
    work.add_copy(PACK, part, Slot(0, shares_gpu=shares_gpu))
    found = work.records()
    assert len(work) == len(found) == chunks(16 * count, shares_gpu=shares_gpu)[0] <= 4096
    ends = found["first"].astype(int) + found["nunits"]
    assert [*found["first"]] == [0, *ends[:-1]]
    assert ends[-1] == count


def message(peer, tag, sizes, route):
    return MessageInfo(peer, tag, tuple(PartInfo(*each, None) for each in sizes), route)


@pytest.mark.parametrize(("sharing", "count"), [((), 128), ({0}, 32), ({1}, 32), ({2}, 128)])
def test_flags_are_as_many_as_items_where_an_end_shares_its_gpu_too(sharing, count):
    messages = [[message(1, 0, [(0, 2 << 20)], "fused")], []]
    routes = [{1: "fused"}, {0: "fused"}]
    flags = staging_layout(messages, routes, range(2), 1, sharing).flags[0, 1, 0, 0]
    layout = FieldLayout((2 << 17,), (8,), np.dtype("f8"), 0)
    work = WorkList([layout], [16], lambda array: 0)
    part = Part.of_box(0, layout, Box((0,), (2 << 17,)))
    work.add_copy(UNPACK, part, Slot(0, 0, flags, shares_gpu=bool({0, 1} & set(sharing))))
    assert [len(work), len(flags)] == [count, count]


def test_staging_has_room_for_each_part_and_a_flag_for_each_item_and_each_silent_neighbor():
    routes = [{1: "fused", 2: "fused"}, {0: "fused"}, {0: "fused"}]
    messages = [
        [message(1, 0, [(0, 140_000), (1, 170_000)], "fused")],
        [message(0, 3, [(0, 140_000)], "fused"), message(0, 4, [(0, 7)], "copy")],
        [],
    ]
    first = staging_layout(messages, routes, range(3), 0)
    assert set(first.flags) == {(1, 0, 3, 0), silent_key(2, 0)}
    assert set(first.parts) == {(1, 0, 3, 0), (1, 0, 4, 0)}
    assert first.parts[1, 0, 4, 0] + 7 <= first.parts[1, 0, 3, 0] + first.parity_offset
    second = staging_layout(messages, routes, range(3), 1)
    assert [len(flags) for flags in second.flags.values()] == [9, 11]
    flags = [at for each in second.flags.values() for at in each]
    assert len(set(flags)) == len(flags)
    parts_begin = second.parts[0, 1, 0, 0]
    assert max(flags) < parts_begin
    assert second.parts[0, 1, 0, 1] >= second.parts[0, 1, 0, 0] + 140_000
    assert second.parts[0, 1, 0, 1] + 170_000 <= second.parts[0, 1, 0, 0] + second.parity_offset
    assert second.nbytes == parts_begin + 2 * second.parity_offset


@pytest.mark.parametrize("nbytes", [1, 3, 6, 100, 127 * 1024 + 5])
def test_what_travels_by_ll_has_a_word_for_four_bytes_and_no_flag(nbytes):
    routes = [{1: "fused"}, {0: "fused"}]
    messages = [[message(1, 0, [(0, nbytes), (1, 200_000), (2, 64)], "fused")], []]
    found = staging_layout(messages, routes, range(2), 1)
    assert set(found.flags) == {(0, 1, 0, 1)}  # too large
    assert found.parts[0, 1, 0, 1] >= found.parts[0, 1, 0, 0] + 8 * -(-nbytes // 4)
    assert found.parts[0, 1, 0, 2] + 8 * 16 <= found.parts[0, 1, 0, 0] + found.parity_offset
    # A sender with parts, by LL or not, needs no flag that says nothing else.
    assert set(staging_layout(messages, routes, range(2), 0).flags) == {silent_key(1, 0)}


def test_what_waits_comes_after_what_it_waits_for_on_all_ranks():
    loaded = []
    layout = FieldLayout((1 << 20,), (8,), np.dtype("f8"), 0)
    part = Part.of_box(0, layout, Box((0,), (1 << 20,)))
    work = WorkList([layout], [16], lambda array: loaded.append(array) or 0)
    flags = list(range(1, 1 + chunks(part.nbytes, shares_gpu=False)[0]))
    work.add_copy(UNPACK, part, Slot(0, 0, flags))
    work.add_copy(PACK, part, Slot(0, 0, flags))
    assert work.load() == (0, 2 * len(flags), 0)
    items = [(int(item["flag"]), int(item["kind"])) for item in loaded[-1]]
    packs = {flag: at for at, (flag, kind) in enumerate(items) if kind == PACK}
    waits = {flag: at for at, (flag, kind) in enumerate(items) if kind == UNPACK}
    assert all(packs[flag] < waits[flag] for flag in flags)
    assert waits[1] < packs[flags[-1]]  # and not after all others


def test_pinned_parts_do_not_overlap():
    messages = [
        [message(1, 0, [(0, 100), (1, 8)], "pinned")],
        [message(0, 1, [(0, 5)], "pinned")],
    ]
    found = pinned_layout(messages, range(2))
    assert sorted(found.parts.values()) == [0, 112, 128]
    assert found.parity_offset >= 144
    assert found.nbytes == 2 * found.parity_offset


# What the kernels have always read: the layout of the structs in C, little-endian.
PART = Struct("<q8qQ8I4i")  # first, step, places, extent, axes, along, field, unit
ITEM = Struct(f"<{PART.size}sQqQQQIIiiii")


def test_records_are_the_structs_of_the_kernels():
    assert (PART_RECORD.itemsize, ITEM_RECORD.itemsize) == (PART.size, ITEM.size) == (128, 192)
    offsets = [ITEM_RECORD.fields[name][1] for name in ITEM_RECORD.names]
    assert offsets == [0, 128, 136, 144, 152, 160, 168, 172, 176, 180, 184, 188]
    offsets = [PART_RECORD.fields[name][1] for name in PART_RECORD.names]
    assert offsets == [0, 8, 72, 80, 112, 116, 120, 124]


def test_the_bytes_of_items_are_those_of_the_structs():
    loaded = {}

    def upload(array):
        loaded[(len(loaded) + 1) << 40] = array.tobytes()
        return len(loaded) << 40

    layout = FieldLayout((6, 700), (5600, 8), np.dtype("f8"), 0)
    box = Part.of_box(1, layout, Box((2, 1), (4, 699)))
    rows = Part.of_indices(0, layout, 0, np.array([5, 0], np.int64))
    work = WorkList([layout, layout], [16, 8], upload)
    work.add_copy(PACK, box, Slot(1 << 50, -256, [7, 8, 9], stalled_on=11))
    work.add_copy(PUT_LL, rows, Slot(4096, stalled_on=12))
    work.add_local(box, box)
    work.add_signal(UNPACK, 13, 14)
    address, count, _ = work.load()
    box_record = PART.pack(2 * 5600 + 8, 5600, 8, *[0] * 6, 0, 2, 698, *[0] * 6, 2, -1, 1, 8)
    indices = 1 << 40
    rows_record = PART.pack(0, 5600, 8, *[0] * 6, indices, 2, 700, *[0] * 6, 2, 0, 0, 8)
    assert loaded[indices] == rows.indices.tobytes()
    target = 2 << 40
    assert loaded[target] == box_record
    signal = PART.pack(*[0] * 21, 1)
    right = [  # by position: chunk k of what does not wait at 2 k, then what waits
        ITEM.pack(box_record, 1 << 50, -256, 7, 11, 0, 0, 512, PACK, 0, 0, 0),
        ITEM.pack(rows_record, 4096, 0, 0, 12, 0, 0, 512, PUT_LL, 0, 0, 0),
        ITEM.pack(box_record, 0, 0, 0, 0, target, 0, 512, 2, 0, 0, 0),
        ITEM.pack(box_record, 1 << 50, -256, 8, 11, 0, 512, 512, PACK, 0, 0, 0),
        ITEM.pack(rows_record, 4096, 0, 0, 12, 0, 512, 512, PUT_LL, 0, 0, 0),
        ITEM.pack(box_record, 0, 0, 0, 0, target, 512, 512, 2, 0, 0, 0),
        ITEM.pack(box_record, 1 << 50, -256, 9, 11, 0, 1024, 372, PACK, 0, 0, 0),
        ITEM.pack(rows_record, 4096, 0, 0, 12, 0, 1024, 376, PUT_LL, 0, 0, 0),
        ITEM.pack(box_record, 0, 0, 0, 0, target, 1024, 372, 2, 0, 0, 0),
        ITEM.pack(signal, 0, 0, 13, 14, 0, 0, 0, UNPACK, 0, 0, 0),
    ]
    assert count == len(right)
    assert loaded[address] == b"".join(right)


def test_an_empty_list_is_one_record_of_zeros():
    loaded = []
    work = WorkList([], [], lambda array: loaded.append(array.tobytes()) or 7)
    assert work.load() == (7, 0, 0)
    assert loaded == [bytes(ITEM.size)]


def test_parts_by_ll_are_known_whole_and_those_sent_come_first():
    layout = FieldLayout((4, 5000), (5000, 1), np.dtype("u1"), 0)
    work = WorkList([layout], [16], lambda array: 0)
    rows = [Part.of_box(0, layout, Box((row, 0), (row + 1, 5000))) for row in range(4)]
    assert work.is_ll
    work.add_copy(GET_LL, rows[0], Slot(1000, 64, stalled_on=7))
    work.add_copy(PUT_LL, rows[1], Slot(2000, 64))
    work.add_copy(PUT_LL, Part.of_box(0, layout, Box((2, 3), (3, 10))), Slot(3000, 64))
    parts = work.ll_parts()
    assert parts["kind"].tolist() == [PUT_LL, PUT_LL, GET_LL]
    assert parts["packed"].tolist() == [2000, 3000, 1000]
    units = parts["part"]["unit"].tolist()
    assert units == [8, 1, 8]
    assert (parts["nunits"] * units).tolist() == [5000, 7, 5000]
    assert (work.log_ll_chunks, len(work)) == (1, 5)  # of 4 KiB
    assert work.is_ll
    work.add_signal(PACK, 1)
    assert not work.is_ll

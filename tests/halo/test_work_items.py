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
    ADD,
    AXES,
    GET_LL,
    ITEM_RECORD,
    PACK,
    PACK_AND_ZERO,
    PART_RECORD,
    PUT_LL,
    PUT_LL_AND_ZERO,
    UNPACK,
)
from mpishare.plans.exchange.cuda.regions import regions_of
from mpishare.plans.exchange.cuda.strided import StridedCells
from mpishare.plans.exchange.cuda.work_items import (
    Slot,
    Source,
    WorkList,
    chunks,
    packed_layout,
    uses_ll,
)
from mpishare.plans.layout import FieldLayout
from mpishare.plans.message import ALIGN, Part


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


def test_what_waits_comes_after_what_it_waits_for_on_all_ranks():
    loaded = []
    layout = FieldLayout((1 << 20,), (8,), np.dtype("f8"), 0)
    part = Part.of_box(0, layout, Box((0,), (1 << 20,)))
    work = WorkList([layout], [16], lambda array: loaded.append(array) or 0)
    flags = list(range(1, 1 + chunks(part.nbytes, shares_gpu=False)[0]))
    work.add_copy(UNPACK, part, Slot(0, 0, flags))
    work.add_copy(PACK, part, Slot(0, 0, flags))
    assert work.load() == (0, 2 * len(flags), ())
    items = [(int(item["flag"]), int(item["kind"])) for item in loaded[-1]]
    packs = {flag: at for at, (flag, kind) in enumerate(items) if kind == PACK}
    waits = {flag: at for at, (flag, kind) in enumerate(items) if kind == UNPACK}
    assert all(packs[flag] < waits[flag] for flag in flags)
    assert waits[1] < packs[flags[-1]]  # and not after all others


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=2),
    st.sampled_from([(40, 30), (300, 700), (2000, 900)]),
    st.booleans(),
)
def test_regions_wait_for_chunks_that_are_sent_before_on_all_ranks(cut, shape, shares_gpu):
    loaded = []
    layout = FieldLayout(shape, (8 * shape[1], 8), np.dtype("f8"), 0)
    lower = tuple(low for low, _ in cut)
    near = Box(lower, tuple(n - high for (_, high), n in zip(cut, shape, strict=True)))
    part = Part.of_box(0, layout, Box((0, 0), shape))
    count, step = chunks(part.nbytes, shares_gpu=shares_gpu)
    flags = () if uses_ll(part.nbytes) else [*range(32, 32 * count + 32, 32)]
    slot = Slot(1 << 20, 0, flags, shares_gpu=shares_gpu)
    work = WorkList([layout], [16], lambda array: loaded.append(array) or 0)
    there = Source(Part.of_box(0, layout, near), packed_layout(part, 8), part.nbytes, slot)
    work.add_region(Part.of_box(0, layout, near), [there])
    work.add_copy(PACK_AND_ZERO if flags else PUT_LL_AND_ZERO, part, slot)
    assert work.is_ll == (not flags)
    work.load()
    sent, added = 0, 0
    for item in loaded[-1]:
        if item["kind"] != ADD:
            sent += item["nunits"] * item["part"]["unit"]
            continue
        assert item["first"] == added
        added += int(item["nunits"])
        row, column = divmod(added - 1, near.shape[1])
        last = (near.lower[0] + row) * shape[1] + near.lower[1] + column
        assert sent >= min(8 * last // step * step + step, part.nbytes)
    assert added == near.size


BOXES = st.tuples(*2 * [st.tuples(st.integers(0, 5), st.integers(1, 4))])


@given(st.lists(BOXES, max_size=7))
def test_regions_have_the_cells_of_their_boxes(pairs):
    boxes = [Box((a, b), (a + n, b + m)) for (a, n), (b, m) in pairs]
    right, found = {}, {}
    for number, box in enumerate(boxes):
        for cell in np.ndindex(10, 10):
            if (Box(cell, tuple(at + 1 for at in cell)) & box).size:
                right.setdefault(cell, []).append(number)
    for region, numbers in regions_of(tuple(boxes)):
        for cell in itertools.product(*map(range, region.lower, region.upper)):
            assert cell not in found
            found[cell] = [*numbers]
    assert found == right


# What the kernels have always read: the layout of the structs in C, little-endian.
PART = Struct("<q8qQ8I4i")  # first, step, places, extent, axes, along, field, unit
ITEM = Struct(f"<{PART.size}sQqQQQIIiiiiII8x")


def test_records_are_the_structs_of_the_kernels():
    assert (PART_RECORD.itemsize, ITEM_RECORD.itemsize) == (PART.size, ITEM.size) == (128, 208)
    offsets = [ITEM_RECORD.fields[name][1] for name in ITEM_RECORD.names]
    assert offsets == [0, 128, 136, 144, 152, 160, 168, 172, 176, 180, 184, 188, 192, 196, 200]
    offsets = [PART_RECORD.fields[name][1] for name in PART_RECORD.names]
    assert offsets == [0, 8, 72, 80, 112, 116, 120, 124]


def test_what_one_block_runs_comes_chunk_by_chunk():
    """Behind all items that have a block of their own."""
    layout = FieldLayout((100, 10_000), (80_000, 8), np.dtype("f8"), 0)
    work = WorkList([layout], [ALIGN], lambda _: 0)
    for row, count in ((0, 10_000), (1, 40), (2, 10_000)):
        part = Part.of_box(0, layout, Box((row, 0), (row + 1, count)))
        with work.one_block():
            for kind in (PUT_LL, GET_LL, GET_LL)[: 1 + row]:
                work.add_copy(kind, part, Slot(256))
    items, first = work.records(), len(work)
    assert first == 2 * 20 + 1
    found = [
        (item["part"]["first"] // 80_000, item["first"], [*items["kind"][at : at + item["more"]]])
        for item in items[:first]
        for at in [item["next"]]
    ]
    wanted = [(0, 0, []), (1, 0, [GET_LL]), (2, 0, [GET_LL, GET_LL])]
    for chunk in range(1, 20):
        wanted += [(row, 512 * chunk, [GET_LL, GET_LL][:row]) for row in (0, 2)]
    assert found == wanted
    assert items["more"].sum() == len(items) - first
    for item in items[:first]:
        assert {*items["first"][item["next"] :][: item["more"]]} <= {item["first"]}

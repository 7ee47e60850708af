"""Work items of a part as kernels run them, without a GPU: chunks, tiles where axes are turned."""

from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mpishare.plans.cells import Box
from mpishare.plans.exchange.cuda import work_items
from mpishare.plans.exchange.cuda.records import LOCAL, PACK, PART_RECORD, UNPACK
from mpishare.plans.exchange.cuda.tiles import travel_order
from mpishare.plans.exchange.cuda.work_items import Slot, WorkList, chunks
from mpishare.plans.layout import FieldLayout
from mpishare.plans.message import Part

DTYPES = ("i1", "f2", "f4", "f8", "c16", "V3", "V12")


class Memory:
    """What was uploaded, at made-up addresses, and the work lists that upload it."""

    def __init__(self):
        self.uploaded = {}

    def work(self, arrays, alignment=16):
        layouts = [FieldLayout.of_host(array) for array in arrays]
        return WorkList(layouts, [alignment] * len(arrays), self._upload)

    def _upload(self, array):
        address = (len(self.uploaded) + 1) << 40
        self.uploaded[address] = array.tobytes()
        return address

    def array(self, address, count, dtype):
        base = address >> 40 << 40
        return np.frombuffer(self.uploaded[base], dtype, count, address - base)

    def part(self, address):
        return self.array(address, 1, PART_RECORD)[0]


def places(memory, part):
    """The byte offsets of units in their order, as offset_of in work_items.cuh finds them."""
    found = np.full((), int(part["first"]))
    for axis in range(int(part["axes"])):
        count, step = int(part["extent"][axis]), int(part["step"][axis])
        is_named = axis == part["along"]
        named = memory.array(int(part["places"]), count, "i8") if is_named else np.arange(count)
        found = np.add.outer(found, named * step)
    return found


def copied(into, to, source, of, unit):
    """Copy units; none of them may be stored twice."""
    assert len(np.unique(to)) == to.size == of.size
    assert not (to % unit).any()
    assert not (of % unit).any()
    for k in range(unit):
        into[to.ravel() + k] = source[of.ravel() + k]


def run(memory, items, fields, packed):
    """Do as the kernels; return how many items went by tiles."""
    tiled = 0
    for item in items:
        part, unit, kind = item["part"], int(item["part"]["unit"]), item["kind"]
        chunk = slice(int(item["first"]), int(item["first"]) + int(item["nunits"]))
        at = places(memory, part).ravel()
        assert chunk.stop <= at.size
        at = at[chunk]
        field = fields[int(part["field"])]
        there = int(item["packed"]) + np.arange(chunk.start, chunk.stop) * unit
        if kind == LOCAL:
            target = memory.part(int(item["target"]))
            into = places(memory, target).ravel()[chunk]
            copied(fields[int(target["field"])], into, field, at, unit)
        elif kind == PACK:
            copied(packed, there, field, at, unit)
        else:
            copied(field, at, packed, there, unit)
        if item["log_columns"]:
            tiled += 1
            rows, columns = 1 << int(item["log_rows"]), 1 << int(item["log_columns"])
            assert rows * (columns * unit + max(unit, 4)) <= (32 << 10) + 256 * max(unit, 4)
            target = part if kind == UNPACK else memory.part(int(item["target"]))
            last = int(part["axes"]) - 1
            assert target["step"][last - 1] == unit  # a row of tiles is along the target's fastest
            assert kind == UNPACK or part["step"][last] == unit
    return tiled


def bytes_of(array):
    return np.frombuffer(array, "u1") if array.flags.owndata else array.base.reshape(-1).view("u1")


@st.composite
def cases(draw):
    """An array of each end, maybe of every second element, and the box of a part in it.

    The order of the axes is another one at the receiver.
    """
    ndim, step = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    most = {1: 900, 2: 90, 3: 30, 4: 12}[ndim]
    shape = draw(st.lists(st.integers(1, most), min_size=ndim, max_size=ndim))
    order = draw(st.permutations(range(ndim)))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    margins = [draw(st.lists(st.integers(0, 2), min_size=ndim, max_size=ndim)) for _ in range(4)]
    arrays, boxes = [], []
    for axes, (before, after) in ((range(ndim), margins[:2]), (order, margins[2:])):
        extents = [a + n + b for a, n, b in zip(before, shape, after, strict=True)]
        whole = np.zeros([step * extents[axis] for axis in axes], dtype)
        arrays.append(whole[(slice(None, None, step),) * ndim].transpose(np.argsort(axes)))
        boxes.append(Box(tuple(before), tuple(a + n for a, n in zip(before, shape, strict=True))))
    cells = bytes_of(arrays[0])
    cells[:] = np.random.default_rng(draw(st.integers(0, 9))).integers(0, 251, cells.size)
    return arrays, boxes


@given(cases(), st.data())
def test_named_places_are_packed_in_their_order(case, data):
    (array, _), _ = case
    axis = data.draw(st.integers(0, array.ndim - 1))
    named = data.draw(st.lists(st.integers(0, array.shape[axis] - 1), min_size=1, max_size=7))
    part = Part.of_indices(0, FieldLayout.of_host(array), axis, np.array(named))
    memory, packed = Memory(), np.zeros(part.nbytes, "u1")
    work = memory.work([array])
    work.add_copy(PACK, part, Slot(0))
    run(memory, work.records(), [bytes_of(array)], packed)
    assert packed.tobytes() == array[part.key].tobytes()


def ends_of(arrays, boxes):
    layouts = [FieldLayout.of_host(array) for array in arrays]
    return [
        (Part.of_box(field, layouts[field], boxes[field], 1 - field), layouts[field])
        for field in (0, 1)
    ]


@given(cases(), st.booleans(), st.booleans(), st.sampled_from((1, 16)))
def test_what_is_packed_in_boxes_is_unpacked_where_it_belongs(case, back, shares_gpu, alignment):
    arrays, boxes = case
    memory, fields = Memory(), [bytes_of(array) for array in arrays]
    if back:  # from the permuted array to the other
        fields[1][:] = np.random.default_rng(1).integers(0, 251, fields[1].size)
    ends = ends_of(arrays, boxes)
    (sent, near), (received, far) = ends[::-1] if back else ends
    nbytes = sent.nbytes
    packed, flags = np.zeros(nbytes, "u1"), [*range(1, 2000)]
    lists = []
    for kind, part, layout in ((PACK, sent, far), (UNPACK, received, near)):
        work = memory.work(arrays, alignment)
        work.add_copy(kind, part, Slot(0, 0, flags, None, layout, shares_gpu=shares_gpu))
        lists.append(work.records())
    assert len(lists[0]) == len(lists[1]) <= chunks(nbytes, shares_gpu=shares_gpu)[0]
    assert [*lists[0]["flag"]] == [*lists[1]["flag"]] == flags[: len(lists[0])]
    right = arrays[sent.field][sent.key].tobytes()
    run(memory, lists[0], fields, packed)
    tiled = run(memory, lists[1], fields, packed)
    assert tiled == (len(lists[1]) if near is not None and travel_order(sent, near, far) else 0)
    assert arrays[received.field][received.key].tobytes() == right


@given(cases(), st.booleans())
def test_own_parts_are_moved_by_tiles_too_unless_they_are_small(case, is_small):
    arrays, boxes = case
    memory = Memory()
    (sent, near), (received, far) = ends_of(arrays, boxes)
    work = memory.work(arrays, arrays[0].dtype.itemsize)
    tiled_axes = () if is_small else travel_order(sent, near, far)[-2:]
    least = sent.nbytes + is_small
    with mock.patch.object(work_items, "_MIN_TILED_NBYTES", least):
        work.add_local(sent, received)
    tiled = run(memory, work.records(), [bytes_of(array) for array in arrays], None)
    assert bool(tiled) == bool(tiled_axes)
    assert arrays[0][sent.key].tobytes() == arrays[1][received.key].tobytes()


def test_named_places_are_not_transposed():
    """The other end, which knows no more of them, may have them anywhere."""
    array = np.empty((64, 64))
    layouts = FieldLayout.of_host(array), FieldLayout.of_host(array.T)
    whole = Part.of_box(0, layouts[0], Box((0, 0), (64, 64)))
    assert travel_order(whole, *layouts)
    assert not travel_order(Part.of_indices(0, layouts[0], 0, np.arange(64)), *layouts)


def test_axes_whose_cells_do_not_lie_together_are_not_transposed():
    """The box has one plane along the receiver's fastest axis, so another is fastest in it."""
    shape = (20, 3, 20)
    sender = FieldLayout(shape, (480, 160, 8), np.dtype("f8"), 0)
    receiver = FieldLayout(shape, (24, 8, 480), np.dtype("f8"), 0)
    part = Part.of_box(0, sender, Box((0, 0, 0), (20, 1, 20)))
    assert not travel_order(part, sender, receiver)
    packed = FieldLayout(shape, (8, 3200, 160), np.dtype("f8"), 0)
    assert travel_order(part, sender, packed) == (0, 2)

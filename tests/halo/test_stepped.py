"""Parts with a step as kernels and messages see them, without a GPU: against NumPy."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpishare.errors import UnsupportedError
from mpishare.halo.cuda.pieces import is_in_one_piece, split
from mpishare.halo.cuda.records import PACK, UNPACK
from mpishare.halo.cuda.work_items import Slot
from mpishare.halo.host import process_read
from mpishare.plans import message
from mpishare.plans.cells import Box, Cells
from mpishare.plans.layout import FieldLayout, host_layout
from mpishare.plans.message import Message, Part, pack_messages, unpack_messages
from tests.halo.test_tiles import Memory, bytes_of, layout_of, run
from tests.helpers.stepped import stepped_along


@st.composite
def parts(draw):
    """Two fields, and a part of each, of one chunk, with every second plane along one axis."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    axis = draw(st.integers(0, len(shape) - 1))
    margins = [draw(st.lists(st.integers(0, 3), min_size=len(shape), max_size=len(shape)))
               for _ in range(3)]  # fmt: skip
    boxes = stepped_along(axis)
    arrays, found = [], []
    for number, start in enumerate(margins[:2]):
        stop = [at + n for at, n in zip(start, shape, strict=True)]
        whole = [at + n for at, n in zip(stop, margins[2], strict=True)]
        array = np.arange(np.prod(whole), dtype=draw(st.sampled_from(("f4", "f8")))
                          if not arrays else arrays[0].dtype).reshape(whole)  # fmt: skip
        arrays.append(array * (1 - 2 * number) - number)
        box = boxes(tuple(start), tuple(stop))
        found.append(Part.of_box(number, layout_of(arrays[-1]), box))
    return arrays, found


@given(parts())
def test_packed_and_unpacked(case):
    arrays, (sent, received) = case
    memory, fields = Memory(), [bytes_of(each) for each in arrays]
    packed = np.zeros(sent.nbytes, "u1")
    right = arrays[1].copy()
    right[received.key] = arrays[0][sent.key]
    for kind, part in ((PACK, sent), (UNPACK, received)):
        work = memory.work(arrays, arrays[0].itemsize)
        work.add_copy(kind, part, Slot(0))
        run(memory, work.records(), fields, packed)
    assert packed.tobytes() == arrays[0][sent.key].tobytes()
    assert np.array_equal(arrays[1], right)


@given(parts())
def test_moved_within_a_rank(case):
    arrays, (sent, received) = case
    memory = Memory()
    right = arrays[1].copy()
    right[received.key] = arrays[0][sent.key]
    work = memory.work(arrays)
    work.add_local(sent, received)
    run(memory, work.records(), [bytes_of(each) for each in arrays], None)
    assert np.array_equal(arrays[1], right)


def test_another_order_of_axes_is_refused_where_tiles_need_runs():
    shape = (20, 20)
    near = FieldLayout(shape, (160, 8), np.dtype("f8"), 0)
    far = FieldLayout(shape, (8, 160), np.dtype("f8"), 0)
    arrays = [np.empty(shape), np.empty(shape)]
    for axis, is_refused in ((0, False), (1, True)):
        part = Part.of_box(0, near, stepped_along(axis)((0, 0), shape))
        work = Memory().work(arrays)
        work.add_copy(PACK, part, Slot(0, far=far))
        if is_refused:
            with pytest.raises(UnsupportedError, match="in steps of 16 bytes"):
                work.add_copy(UNPACK, part, Slot(0, far=far))
        else:
            work.add_copy(UNPACK, part, Slot(0, far=far))


def test_only_cells_without_a_step_are_one_piece():
    layout = layout_of(np.empty((6, 8)))
    for axis, shape, is_row in ((0, (1, 8), True), (0, (3, 8), False), (1, (1, 8), False)):
        part = Part.of_box(0, layout, stepped_along(axis)((1, 0), (1 + shape[0], shape[1])))
        assert is_in_one_piece(Message(1, 0, (part,)), [layout]) == is_row


def test_a_message_out_of_a_field_begins_at_the_first_cell(monkeypatch):
    pytest.importorskip("cupy")
    from mpishare.halo.cuda.mpi_in_place import InPlaceMessages

    seen = []
    monkeypatch.setattr(
        "mpishare.halo.cuda.mpi_in_place.MpiMessages", lambda *given: seen.extend(given[4:6])
    )
    field = np.arange(48.0).reshape(6, 8)
    layout = layout_of(field)
    part = Part.of_box(0, layout, stepped_along(0)((2, 0), (4, 8)))
    one = [Message(1, 0, (part,))]
    InPlaceMessages(None, "plan", one, one, [layout])._bind((field.ctypes.data,))
    assert [bytes(each) for (each,) in seen] == [field[2].tobytes()] * 2


def test_the_pieces_are_its_cells():
    layout = layout_of(np.empty((9, 1 << 18)))
    part = Part.of_box(0, layout, stepped_along(0)((1, 0), (8, 1 << 18)))
    seen = np.zeros(layout.shape, int)
    for (piece,) in split([Message(1, 0, (part,))], [[layout]] * 2, 0, 16, on_gpu=False):
        seen[piece.parts[0].key] += 1
    right = np.zeros(layout.shape, int)
    right[part.key] = 1
    assert np.array_equal(seen, right)


def test_other_ranks_learn_the_step(monkeypatch):
    boxes = stepped_along(1)
    monkeypatch.setattr(message, "Box", boxes)
    layout = layout_of(np.empty((6, 8)))
    part = Part.of_box(0, layout, boxes((1, 0), (3, 7)))
    packed = json.loads(json.dumps(pack_messages([Message(1, 0, (part,))])))
    (found,) = unpack_messages(packed, {1: "host"})
    assert found.parts[0].box == part.box
    assert found.parts[0].box.slices == part.key


@pytest.mark.parametrize("is_source", [False, True])
def test_a_read_between_rows_and_every_second_row(is_source):
    """The cells of one end lie together, those of the other do not."""
    fields = [np.arange(48.0).reshape(6, 8).copy(), np.zeros((12, 8))]
    boxes = [Box((1, 0), (4, 8)), stepped_along(0)((2, 0), (8, 8))]
    source, target = (1, 0) if is_source else (0, 1)
    layouts = [host_layout(each, "field") for each in fields]
    right = fields[target].copy()
    right[boxes[target].slices] = fields[source][boxes[source].slices]
    memory = bytes_of(fields[source])
    for block in process_read._blocks(
        layouts[source], layouts[target], boxes[source], boxes[target]
    ):
        offset, nbytes = block.extent
        read = memory[offset : offset + nbytes]
        if block.strides is None:  # straight into the field
            first = Cells.of_key(layouts[target], block.key).offset
            bytes_of(fields[target])[first : first + nbytes] = read
        else:
            cells = fields[target][block.key]
            cells[...] = np.ndarray(cells.shape, float, read.copy(), strides=block.strides)
    assert np.array_equal(fields[target], right)

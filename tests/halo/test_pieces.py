"""Large messages in pieces: both ends cut alike, and every cell travels once."""

import numpy as np
import pytest

from mpishare.plans.cells import Box
from mpishare.plans.exchange.cuda.pieces import MAX_STAGES, is_in_one_piece, split
from mpishare.plans.layout import FieldLayout
from mpishare.plans.message import Message, Part

MIB = 1 << 20


def layout_of(shape, dtype="f8"):
    return FieldLayout(shape, np.empty(shape, dtype).strides, np.dtype(dtype), None)


def stages(parts, layouts, most=MAX_STAGES, *, on_gpu=False):
    return [*split([Message(1, 5, tuple(parts))], [layouts] * 2, 0, most, on_gpu=on_gpu)]


@pytest.mark.parametrize(
    ("start", "stop"),
    [((1, 0), (2, 1 << 19)), ((0, 7), (1 << 18, 9)), ((3, 1), (700, 1001)), ((0, 0), (3, 1 << 18))],
)
def test_the_pieces_of_a_box_are_its_cells(start, stop):
    """Each once, aligned where they are contiguous."""
    shape = tuple(np.array(stop) + 2)
    layout = layout_of(shape)
    found = stages([Part.of_box(0, layout, Box(start, stop))], [layout])
    seen = np.zeros(shape, int)
    for (message,) in found:
        (piece,) = message.parts
        seen[piece.key] += 1
        assert piece.shape == seen[piece.key].shape
        assert (piece.box.lower[1] - start[1]) % 16 == 0
    right = np.zeros(shape, int)
    right[tuple(map(slice, start, stop))] = 1
    assert np.array_equal(seen, right)
    nbytes = 8 * right.sum()
    assert len(found) == min(nbytes // MIB, MAX_STAGES) > 1


def test_both_ends_cut_alike():
    """A face and the ghosts of another array, indices and others: piece by piece of one shape."""
    here, there = layout_of((40, 1 << 16)), layout_of((90, 1 << 16))
    face = Part.of_box(0, here, Box((30, 0), (38, 1 << 16)))
    ghosts = Part.of_box(0, there, Box((82, 0), (90, 1 << 16)))
    sent, received = stages([face], [here]), stages([ghosts], [there])
    assert [m.parts[0].shape for (m,) in sent] == [m.parts[0].shape for (m,) in received]
    assert len(sent) == 4
    cells = layout_of((1 << 19, 3), "f4")
    some, others = np.arange(1 << 18)[::-1].copy(), np.arange(1 << 18, 1 << 19)
    sent, received = (
        stages([Part.of_indices(0, cells, 0, indices)], [cells]) for indices in (some, others)
    )
    assert [m.nbytes for (m,) in sent] == [m.nbytes for (m,) in received]
    assert np.array_equal(np.concatenate([m.parts[0].indices for (m,) in sent]), some)
    assert np.array_equal(
        np.concatenate([np.arange(1 << 19)[m.parts[0].key[0]] for (m,) in received]), others
    )


def test_named_places_are_cut_although_they_follow_each_other():
    """At the other end they may not."""
    layout = layout_of((4 << 20,))
    message = Message(1, 5, (Part.of_indices(0, layout, 0, np.arange(3 << 20)),))
    assert is_in_one_piece(message, [layout])
    assert not is_in_one_piece(message, [layout], [layout])
    assert len(stages(message.parts, [layout], on_gpu=True)) == 3


def test_small_ones_stay_whole_and_memory_of_gpus_takes_larger_pieces():
    layout = layout_of((2, 1 << 20))
    small, large = (Part.of_box(0, layout, Box((0, 0), (1, n))) for n in (1 << 17, 1 << 20))
    whole = Message(1, 5, (small,))
    assert [*split([whole], [[layout]] * 2, 0, MAX_STAGES, on_gpu=False)] == [[whole]]
    assert len(stages([large], [layout])) == 8
    assert len(stages([large], [layout], 1)) == 1
    assert [*split([], [[layout]] * 2, 0, MAX_STAGES, on_gpu=True)] == []
    strided = Part.of_box(0, layout_of((1 << 21, 2)), Box((0, 1), (1 << 21, 2)))
    assert len(stages([strided], [layout_of((1 << 21, 2))], on_gpu=True)) == 2


def test_what_neither_end_must_pack_stays_whole_in_gpu_memory():
    """Rows at both ends; not if one of them has columns, or for a pair of fields."""
    rows = FieldLayout((4, 1 << 21), (8 << 21, 8), np.dtype("f8"), 0)
    columns = FieldLayout((4, 1 << 21), (8, 32), np.dtype("f8"), 0)
    two = Message(1, 5, (Part.of_box(0, rows, Box((1, 0), (3, 1 << 21))),))
    one = Message(1, 5, (Part.of_box(0, rows, Box((1, 7), (2, 1 << 20))),))
    inner = Message(1, 5, (Part.of_box(0, rows, Box((1, 1), (3, 1 << 20))),))
    assert is_in_one_piece(two, [rows])
    assert is_in_one_piece(one, [rows])
    assert not is_in_one_piece(two, [rows], [columns])
    assert not is_in_one_piece(inner, [rows])
    assert not is_in_one_piece(Message(1, 5, two.parts * 2), [rows, rows])
    whole = [*split([two], [[rows], [rows]], 0, MAX_STAGES, on_gpu=True)]
    assert whole == [[two]]
    for layouts in ([[rows], [columns]], [[columns], [rows]]):
        assert len([*split([two], layouts, 0, MAX_STAGES, on_gpu=True)]) == 4
    assert len([*split([two], [[rows], [rows]], 0, MAX_STAGES, on_gpu=False)]) == MAX_STAGES


def test_a_stage_has_pieces_of_all_messages_that_reach_it():
    layout = layout_of((9, 1 << 19))
    messages = [
        Message(peer, 0, (Part.of_box(0, layout, Box((peer, 0), (peer + 1, n))),))
        for peer, n in enumerate((1 << 19, 1 << 18, 8))
    ]
    found = [*split(messages, [[layout]] * 3, 0, MAX_STAGES, on_gpu=False)]
    assert [[m.peer for m in stage] for stage in found] == [[0, 1, 2], [0, 1], [0], [0]]


def test_a_part_too_short_to_cut_goes_with_one_piece():
    """Many small fields make a large message; no cell is sent twice, and no empty message."""
    box = Box((0, 0, 0), (15, 15, 15))
    layouts = [layout_of((16, 16, 16))] * 200
    parts = [Part.of_box(number, each, box) for number, each in enumerate(layouts)]
    (stage,) = stages(parts, layouts)
    (message,) = stage
    assert message.nbytes > 4 * MIB
    assert [part.box for part in message.parts] == [box] * 200

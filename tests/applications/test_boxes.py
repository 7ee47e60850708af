"""The boxes of the applications: every cell once, also as the threads of a GPU take them."""

import itertools

import numpy as np
import pytest

from scripts.applications import boxes

SHAPES = ((9, 14), (40, 35), (3, 300), (3, 3), (9, 14, 7), (6, 6, 36), (34, 4, 66))


class OnTheGpu:
    """What `Boxes` needs of CuPy: not to be NumPy."""


def splits(shape):
    """The owned cells, and every interior that grids leave, as it is and in whole lines."""
    owned = tuple(slice(1, n - 1) for n in shape)
    for cut in itertools.product((0, 1), repeat=len(shape)):
        inner = tuple(slice(1 + c, max(1 + c, n - 1 - c)) for c, n in zip(cut, shape, strict=True))
        for cells in (1, 16):
            yield owned, inner, boxes.in_lines(inner, owned, cells), cells


@pytest.mark.parametrize("shape", SHAPES)
def test_interior_and_shell_are_the_owned_cells(shape):
    for owned, inner, interior, cells in splits(shape):
        counts, right = np.zeros(shape, int), np.zeros(shape, int)
        right[owned] = 1
        for box in (interior, *boxes.outside(owned, interior)):
            counts[box] += 1
        assert np.array_equal(counts, right)
        allowed = np.zeros(shape, bool)
        allowed[inner] = True
        assert allowed[interior].all()
        begin, end = interior[-1].start, interior[-1].stop
        assert begin == inner[-1].start or (begin - 1) % cells == 0 or begin == end
        assert end == inner[-1].stop or (end - 1) % cells == 0 or begin == end


def cells_of(record, blocks, group):
    """The cells that `my_strip` of boxes.cu gives to all threads, by the same arithmetic."""
    record = record.view(boxes.RECORD)
    plane, row = map(int, record["steps"][0])
    block, thread = (each.ravel() for each in np.indices((blocks, boxes.THREADS)))
    ends = record["boxes"][0, :, 0]
    number = np.searchsorted(ends[: int((ends > 0).sum())], block, side="right")
    block = block - np.where(number > 0, ends[number - 1], 0)
    _, lanes, tiles, rows, depth, march, first, skip, end = record["boxes"][0, number].T
    lane, line = thread & ((1 << lanes) - 1), thread >> lanes
    across = (((block % tiles) << lanes) + lane) * group
    line = line + block // tiles * (boxes.THREADS >> lanes)
    along = line // rows * march
    count = np.minimum(depth - along, march)
    begin, end = np.maximum(skip - across, 0), np.minimum(end - across, group)
    cell = first + along * plane + line % rows * row + across
    found = []
    for step, at in itertools.product(range(int(march.max())), range(group)):
        mine = (step < count) & (begin <= at) & (at < end)
        found.append((cell + step * plane + at)[mine])
    return np.concatenate(found)


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_threads_take_every_cell_once(shape, group):
    pitch = -(-shape[-1] // 8) * 8
    u = np.zeros((*shape[:-1], pitch), "f4")[..., : shape[-1]]
    places = np.arange(u.size // shape[-1] * pitch).reshape(*shape[:-1], pitch)
    for owned, _, interior, _ in splits(shape):
        for which in ([owned], [interior], boxes.outside(owned, interior)):
            for march in (1, 3, 8):
                cut = boxes.Boxes(OnTheGpu, u, which, group=group, march=march)
                right = np.concatenate([places[box].ravel() for box in which])
                taken = cells_of(cut._record, cut._blocks, group) if cut._blocks else []
                assert np.array_equal(np.sort(taken), np.sort(right))

"""Copies in host memory: what they write, and that they write nothing else."""

from itertools import product

import numpy as np
import pytest

from mpishare.halo.host.copies import WHOLE, add, bind_copy, bind_copy_within, merge_runs, put
from mpishare.plans.layout import array_at, host_layout


def numbered(shape, order="C", dtype="f8"):
    """An array whose cells all differ."""
    count = np.prod(shape)
    return np.asarray(np.arange(count).reshape(shape), dtype=dtype, order=order)


def faces(shape, width, axis):
    """Both copies of a rank that is its own neighbor along an axis: (to, of)."""
    inner = [slice(width, extent - width) for extent in shape]
    n = shape[axis]
    pairs = ((0, n - 2 * width), (n - width, width))

    def at(start):
        return (*inner[:axis], slice(start, start + width), *inner[axis + 1 :])

    return [(at(to), at(of)) for to, of in pairs]


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize(
    "shape", [(9,), (9, 10), (9, 10, 11), (13, 9, 9), (9, 9, 13), (9, 9, 9, 10)]
)
def test_copy_within(shape, width, order):
    for axis in range(len(shape)):
        for to, of in faces(shape, width, axis):
            array = numbered(shape, order)
            expected = array.copy()
            expected[to] = expected[of].copy()
            for copy in bind_copy_within(array, to, of):
                copy()
            assert (array == expected).all()


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("planes", [slice(1, 2), slice(2, 5), slice(1, 6)])
def test_copy_within_planes_of_a_larger_array(planes, step):
    """What stands between the cells of a strided field is left as it is."""
    memory = numbered((7 * step, 8 * step, 9 * step))
    expected = memory.copy()
    field, wanted = (each[::step, ::step, ::step] for each in (memory, expected))
    to, of = (planes, slice(1, 7), slice(0, 1)), (planes, slice(1, 7), slice(7, 8))
    wanted[to] = wanted[of].copy()
    for _ in range(2):
        for copy in bind_copy_within(field, to, of):
            copy()
        assert (memory == expected).all()


def test_columns_are_copied_in_a_line():
    """NumPy makes no temporary array: the line covers the ghosts between, which are restored."""
    array = numbered((7, 8, 9))
    to, of = faces(array.shape, 1, 2)[0]
    assert len(bind_copy_within(array, to, of)) == 3
    assert len(bind_copy_within(array, (slice(1, 2), *to[1:]), (slice(1, 2), *of[1:]))) == 1


def test_copy_within_by_indices():
    array = numbered((6, 4))
    expected = array.copy()
    to, of = (np.array([0, 5]),), (np.array([4, 1]),)
    expected[to] = expected[of]
    for copy in bind_copy_within(array, to, of):
        copy()
    assert (array == expected).all()


BOXES = [WHOLE, (slice(1, 3), slice(0, 2)), (np.array([1, 0]), slice(0, 2))]


@pytest.mark.parametrize(("key", "source"), [*product(BOXES[1:], BOXES[1:]), (WHOLE, WHOLE)])
@pytest.mark.parametrize("store", [put, add])
def test_bind_copy(store, key, source):
    """Prepared once, it copies what the cells are when it is called."""
    to, of = np.zeros((4, 3)), np.zeros((4, 3))
    expected = np.zeros((4, 3))
    copy = bind_copy(store, to, key, of, source)
    for step in range(2):
        of[...] = numbered((4, 3)) + step
        store(expected, key, of[source])
        copy()
        assert (to == expected).all()


@pytest.mark.parametrize("dtype", ["f8", "u1", "c16", "i4,i4"])
def test_array_at(dtype):
    array = np.zeros((3, 5, 4), dtype)[:, 1:4, ::2]
    seen = array_at(array.__array_interface__["data"][0], host_layout(array, "it"))
    assert (seen.shape, seen.strides, seen.itemsize) == (array.shape, array.strides, array.itemsize)
    array.view(seen.dtype)[1:, 2, 1] = np.ones((), dtype).view(seen.dtype)
    assert (seen.view(array.dtype) == array).all()
    assert seen.base is not array


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["u1", "f4", "f8", "c16", "V3"])
@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_cells_that_lie_together_are_copied_as_one(axis, width, dtype, order):
    dtype = np.dtype(dtype)
    cells = np.random.default_rng(1).integers(0, 256, (9, 10, 11, dtype.itemsize), np.uint8)
    array = np.asarray(cells.view(dtype)[..., 0], order=order)
    for key in faces(array.shape, width, axis)[0]:
        buffer = np.empty_like(array[key])  # in the order of the array
        target = np.zeros_like(array)
        bind_copy(put, buffer, WHOLE, array, key)()
        assert buffer.tobytes() == array[key].tobytes()
        bind_copy(put, target, key, buffer, WHOLE)()
        assert target[key].tobytes() == array[key].tobytes()
        target[key] = np.zeros((), dtype)
        assert target.tobytes() == bytes(target.nbytes)
        fastest = array.strides.index(min(array.strides))
        run = array[key].shape[fastest]
        merged, _ = merge_runs(buffer, array[key])
        assert merged.size * max(run, 1) <= array[key].size


def test_cells_are_not_merged_across_gaps():
    array = np.zeros((6, 8))
    for target, source in (
        (array[:, :4], array[:, 4:]),
        (array[:, :4:2], array[:, 1:5:2]),
        (array[:, :2], np.zeros((2, 6)).T),
    ):
        merged, other = merge_runs(target, source)
        assert merged.shape == other.shape
        assert merged.nbytes == target.nbytes
    assert merge_runs(array[:, :4], array[:, 4:])[0].shape == (6,)
    assert merge_runs(array[:, :4:2], array[:, 1:5:2])[0].shape == (6, 2)
    assert merge_runs(array[:, :2], np.zeros((2, 6)).T)[0].shape == (6, 2)

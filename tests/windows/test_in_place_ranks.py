"""Arrays that exist already: copied into a window, or shared where they are."""

from functools import partial

import numpy as np
import pytest

from mpishare import PeerError, UnsupportedError
from tests.helpers.windows import address_of, fails_on, nothing_leaked, put, some, values_of

TWO = pytest.mark.ranks(min=2)


def test_share_each_copies_each_ranks_own_array(node):
    shape = (2 + node.rank, 3)
    source = node.xp.asarray(some(shape, "i4", node.rank))
    win = node.share_each(source)
    source[...] = -1
    assert win.owner is None
    assert (win.shape, win.dtype) == (shape, np.dtype("i4"))
    for rank in range(node.size):
        theirs = some((2 + rank, 3), "i4", rank)
        assert np.array_equal(values_of(win.segment(rank)), theirs)
    win.fence()
    win.segment(right_of(node))[0, 0] = 100 + node.rank
    win.fence()
    assert int(win.array[0, 0]) == 100 + (node.rank - 1) % node.size
    win.fence()


@pytest.mark.parametrize("orders", ["C", "F", "CF"])
def test_memory_order_travels_with_a_copy(node, orders):
    """Also where the segments of one window have different ones."""
    mine = node.xp.asarray(some((3, 4), "f8"), order=orders[node.rank % len(orders)])
    each = node.share_each(mine)
    found = [each.segment(rank) for rank in range(node.size)]
    for rank, array in enumerate([*found, node.share(mine).array]):
        is_f = orders[rank % node.size % len(orders)] == "F"
        assert array.flags.f_contiguous == is_f
        assert np.array_equal(values_of(array), some((3, 4), "f8"))


CUTS = {
    "block": lambda node, win: win.array[1:5, 2:7],
    "transposed": lambda node, win: win.array.T,
    "steps": lambda node, win: win.array[::2, 1:8:3],
    "of another rank": lambda node, win: win.segment(right_of(node))[1:],
    "part of a part": lambda node, win: node.share_each(win.array[2:], copy=False).array[1:3, 2:],
}


def right_of(node):
    return (node.rank + 1) % node.size


@pytest.mark.parametrize("cut", CUTS)
def test_a_part_of_a_window_is_a_window_without_new_memory(node, cut):
    """All ranks have it with its strides, and what is written into one is in the other."""
    base = node.allocate_each((6, 8), "f8", fill=-1)
    with nothing_leaked(node):
        part = CUTS[cut](node, base)
        win = node.share_each(part, copy=False)
        assert address_of(win.array) == address_of(part)
        put(node, part, some(part.shape, "f8", node.rank))
        win.fence()
        for rank in range(node.size):
            assert win.segment(rank).strides == part.strides
            assert np.array_equal(values_of(win.segment(rank)), some(part.shape, "f8", rank))
        win.fence()
        win.segment(right_of(node))[0, 0] = 50 + node.rank
        win.fence()
        assert float(part[0, 0]) == 50 + (node.rank - 1) % node.size
        base.fence()
        assert int((base.array != -1).sum()) == part.size
        del part
        win.close()
        node.collect()


def test_negative_strides_are_refused(node):
    base = node.allocate_each(5)
    refused = partial(node.share_each, base.array[::-1], copy=False)
    fails_on(node.comm, range(node.size), UnsupportedError, refused, "strides")
    del refused
    assert node.share_each(base.array[::-1]).shape == (5,)


def test_a_window_of_no_elements(node):
    base = node.allocate_each(4)
    source = base.array[: node.rank]  # rank 0 has none
    win = node.share_each(source, copy=False)
    assert [win.segment(rank).shape for rank in range(node.size)] == [
        (min(rank, 4),) for rank in range(node.size)
    ]
    empty = node.share(node.xp.zeros((3, 0), "f4"), copy=False)
    assert (empty.array.shape, empty.array.dtype) == ((3, 0), np.dtype("f4"))


def test_a_part_outlives_its_window_and_its_arrays_outlive_both(node):
    base = node.allocate_each(8, "i8", fill=node.rank)
    win = node.share_each(base.array[3:], copy=False)
    with pytest.warns(ResourceWarning, match=base.name):
        base.close()
    node.allocate_each(8, "i8", fill=-1)  # takes none of its place
    win.fence()
    win.segment(right_of(node))[0] = 70 + node.rank
    win.fence()
    left = (node.rank - 1) % node.size
    assert values_of(win.array).tolist() == [70 + left] + [node.rank] * 4
    win.fence()
    views = [win.segment(rank)[1:] for rank in range(node.size)]
    win.close()
    node.allocate_each(8, "i8", fill=-1)
    assert [values_of(view).tolist() for view in views] == [[r] * 4 for r in range(node.size)]


@pytest.mark.parametrize("copy", [True, False, None])
@pytest.mark.parametrize(
    ("source", "told"),
    [
        (0xDEADBEEF, f"{0xDEADBEEF} is an int, not an array. Wrap a number in"),
        (None, "owner="),
        (lambda: None, "owner="),
    ],
    ids=["int", "None", "callable"],
)
def test_what_is_no_array(node, source, told, copy):
    for call, ranks in ((node.share, [0]), (node.share_each, range(node.size))):
        fails_on(node.comm, ranks, TypeError, partial(call, source, copy=copy), told)


@TWO
def test_what_one_rank_cannot_share_is_an_error_on_all(node):
    base = node.allocate_each(4)
    odd = node.size - 1
    source = np.zeros(4) if node.rank == odd else base.array
    with nothing_leaked(node):
        fails_on(node.comm, [odd], UnsupportedError, partial(node.share_each, source, copy=False))
    assert node.share_each(base.array, copy=False).shape == (4,)


def test_elements_in_the_same_memory_are_refused_and_copied_by_none(host_node):
    node = host_node
    base = node.allocate_each(5, "i8")
    base.array[...] = np.arange(5)
    source = np.lib.stride_tricks.sliding_window_view(base.array, 3, writeable=True)
    words = r"elements are in the same memory|rank 0"
    with pytest.raises((UnsupportedError, PeerError), match=words):
        node.share(source, copy=False)
    win = node.share_each(source, copy=None)
    assert values_of(win.segment(0)).tolist() == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]
    win.fence()

"""Windows for a table that many ranks read, into which no rank stores any more."""

import mmap
from multiprocessing import shared_memory
from pathlib import Path

import numpy as np
import pytest

from mpishare import MismatchError, Node
from tests.helpers.windows import address_of, nothing_leaked, some, values_of

TWO = pytest.mark.ranks(min=2)
DTYPES = ["f8", "?", "M8[s]", np.dtype([("place", "f8", (3,)), ("id", "i4")])]


def refuses(array):
    """NumPy refuses to store into it, and to make it writable."""
    with pytest.raises(ValueError, match="read-only"):
        array[...] = 0
    with pytest.raises(ValueError, match="cannot set WRITEABLE"):
        array.flags.writeable = True


def protection(array):
    """What the kernel lets this process do with the memory of an array."""
    at = address_of(array)
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, flags, *_ = line.split()
        first, end = (int(each, 16) for each in where.split("-"))
        if first <= at < end:
            return flags
    raise AssertionError(hex(at))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", "CF")
def test_no_rank_can_store(host_node, dtype, order):
    node = host_node
    values = np.zeros((3, 4), dtype, order)
    values[...] = np.arange(12).reshape(3, 4).astype("i8" if dtype == "M8[s]" else "i4")
    owner = node.size - 1
    for source in (values, lambda: values):
        with nothing_leaked(node):
            win = node.share(source, owner=owner, readonly=True)
            assert win.readonly
            assert "readonly" in repr(win)
            assert (win.array == values).all()
            assert win.array.flags.f_contiguous == (order == "F")
            refuses(win.array)
            refuses(win.array[1:])
            refuses(np.asarray(win))
            assert protection(win.array) == ("rw-s" if node.rank == owner else "r--s")
            win.fence()
            win.close()


def test_arrays_in_place(host_node, tmp_path):
    """What the owner stores into its own array is seen; the windows are read-only all the same."""
    node = host_node
    memory = shared_memory.SharedMemory(create=True, size=mmap.PAGESIZE) if node.is_leader else None
    mine = np.ndarray(4, "i8", memory.buf) if memory else None
    part = node.allocate(8, "i8", fill=1)
    for source in (mine, part.array[2:6]):
        win = node.share(source, copy=False, readonly=True)
        refuses(win.array)
        win.fence()
        if node.is_leader:
            source[...] = 7
        win.fence()
        assert win.array.tolist() == [7] * 4
        win.close()
    assert part.array.flags.writeable  # as before
    part.array[0] = 3
    if memory:
        del source, mine
        memory.close()
        memory.unlink()


def test_a_tree(host_node):
    with nothing_leaked(host_node):
        big = host_node.share(some(9, "u1"))
        tree = {"w": some((2, 3), "f4"), "b": [some(5, "u1"), big.array[1:]]}
        found = host_node.share_all(tree, copy=None, readonly=True)
        for win, wanted in ((found["w"], tree["w"]), *zip(found["b"], tree["b"], strict=True)):
            assert np.array_equal(win.array, wanted)
            refuses(win.array)
        host_node.barrier()
        del tree, wanted
        for win in (found["w"], *found["b"], big):
            win.close()


def test_plans_read_it_and_do_not_write(host_node):
    from mpishare import Allreduce, Redistribute

    table = host_node.share(np.arange(8.0), readonly=True)
    with Redistribute(host_node.comm, 8, 0, None, node=host_node) as plan:
        mine = table.array[plan.source_box.slices]
        assert (plan.forward(mine) == table.array).all()
    with Allreduce(host_node.comm, np.zeros(8), node=host_node) as total:
        # NumPy 1 lends such memory to no library.
        with pytest.raises((TypeError, ValueError), match=r"x is .*read-?only"):
            total.reduce(table)
        host_node.barrier()


def test_libraries_are_told_on_a_gpu(node):
    """CuPy has no read-only arrays, and what takes the window itself may have."""
    with Node(node.comm, backend=node.backend) as own:  # keeps the memory to its end
        win, plain = (own.share(some(4, "f8"), readonly=readonly) for readonly in (True, False))
        assert np.array_equal(values_of(win.array), some(4, "f8"))
        if node.backend == "cuda":
            assert win.__cuda_array_interface__["data"] == (address_of(win.array), True)
            assert plain.__cuda_array_interface__["data"][1] is False


@TWO
def test_all_ranks_give_the_same(node):
    with pytest.raises(MismatchError, match=r"rank 0: readonly=True; .*: readonly=False"):
        node.share(some(3, "u1"), readonly=node.rank == 0)

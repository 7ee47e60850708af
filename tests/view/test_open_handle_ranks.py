"""Arrays of a pool opened outside the node: the same bytes, counted, and nothing left."""

import gc

import numpy as np
import pytest

import mpishare
from mpishare import HandleError, UnsupportedError
from tests.helpers.latch import within
from tests.helpers.viewer import viewing
from tests.helpers.windows import MIB, values_of

OPEN = "bytes.fromhex('{}')"


def made(node, pool, shape, dtype="f8", value=1):
    """An array of the leader's pool, and its handle as source for a viewer, on all ranks."""
    array = pool.allocate(shape, dtype) if node.is_leader else None
    if node.is_leader:
        array[...] = value
        node.synchronize()
    return array, node.comm.bcast(OPEN.format(pool.handle(array).hex()) if node.is_leader else "")


def is_allocated(pool, nbytes):
    try:
        pool.allocate(nbytes, "u1")[...] = 1
    except UnsupportedError:
        return False
    return True


def test_a_process_without_mpi_sees_and_writes_the_same_bytes(node, view):
    pool = node.pool()
    array, handle = made(node, pool, (2, 3), "i4", value=7)
    view(f"a = mpishare.open_handle({handle})")
    assert view("host(a)") == [[7] * 3] * 2
    assert view("str(a.dtype), 'mpi4py.MPI' in sys.modules") == ["int32", False]
    view("a[1] = 5")
    view("host(a)")  # on a GPU: when it is done
    if node.is_leader:
        assert values_of(array).tolist() == [[7] * 3, [5] * 3]
    node.barrier()


@pytest.mark.parametrize("end", ["drops it", "is killed"])
def test_a_block_is_reused_when_the_last_other_process_has_let_go(host_node, end):
    node = host_node
    pool = node.pool(max_nbytes=4 * MIB)
    array, handle = made(node, pool, 4 * MIB, "u1", value=3)

    def let_go(view):
        if end == "drops it":
            view("del a; gc.collect()")
        elif view.viewer:
            view.viewer.kill()

    with viewing(node) as view, viewing(node) as other:
        for each in (view, other):
            each(f"a = mpishare.open_handle({handle})")
        del array
        gc.collect()
        let_go(other)
        if node.is_leader:
            with pytest.raises(UnsupportedError, match="4 MiB were asked for"):
                pool.allocate(4 * MIB, "u1")
        assert view("int(a[-1])") == 3
        let_go(view)
        if node.is_leader:
            assert within(60, lambda: is_allocated(pool, 4 * MIB))
        if end == "drops it":
            words = "its array was dropped by the owner"
            view.raises("HandleError", f"mpishare.open_handle({handle})", words)


def test_in_a_rank_of_the_node_it_is_what_the_pool_does(node):
    pool = node.pool()
    array = pool.allocate(3) if node.is_leader else None
    handle = node.comm.bcast(pool.handle(array) if node.is_leader else None)
    if node.is_leader:
        with pytest.raises(ValueError, match="rank 0 is the owner, and has the array"):
            mpishare.open_handle(handle)
    else:
        opened = mpishare.open_handle(handle)
        assert opened.shape == (3,)
        del opened
    node.barrier()


def test_a_closed_pool_leaves_arrays_readable_and_nothing_mapped(host_node, view):
    node = host_node
    pool = node.pool()
    array, handle = made(node, pool, 5, value=4)
    view(f"a = mpishare.open_handle({handle})")
    del array
    pool.close()
    assert view("host(a)") == [4.0] * 5
    view.raises("HandleError", f"mpishare.open_handle({handle})", "open_handle failed: ")
    view("del a; gc.collect(); from tests.helpers.held import held")
    view("from tests.helpers.latch import within")
    assert view("within(60, lambda: held().mapped == 0)")


@pytest.mark.parametrize("bad", [b"", b"x" * 200, bytes(300), np.zeros(3), "text", None])
def test_what_is_no_handle(bad):
    kind = HandleError if isinstance(bad, bytes) else TypeError
    with pytest.raises(kind, match="handle"):
        mpishare.open_handle(bad)

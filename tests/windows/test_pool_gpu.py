"""Pools on GPUs: blocks are reused in the order of streams, also from one GPU to another."""

import gc
import itertools

import pytest

from mpishare import HandleError
from tests.helpers.latch import Latch

CHUNK_NBYTES = 8 << 20
TWO = pytest.mark.ranks(min=2)
MIB = 1 << 20


@TWO
@pytest.mark.parametrize("count", [1 << 10, 1 << 20], ids=["part of a chunk", "large"])
def test_a_block_is_held_until_the_work_of_its_stream_is_done(node, count, cupy):
    """The importer drops its array while a stream that reads it is held back."""
    pool = node.pool()
    if node.is_leader:
        array = pool.allocate(count, "i4")
        array[...], second = 5, pool.allocate(1)
        node.synchronize()
        node.comm.bcast([pool.handle(array), pool.handle(second)])
        node.barrier()
        del array
        gc.collect()
        for _ in range(20):  # would overwrite the block, were it given back
            pool.allocate(count, "i4")[...] = -1
        node.synchronize()
        node.barrier()
    else:
        handle, second = node.comm.bcast(None)
        stream, latch = cupy.cuda.Stream(non_blocking=True), Latch()
        copy = cupy.zeros(count, "i4")
        cupy.cuda.Device().synchronize()
        with latch:
            array = pool.open(handle, stream=stream)
            latch.hold(stream.ptr)
            with stream:
                copy[...] = array
            del array
            gc.collect()
            for _ in range(2):  # each call gives back what is over
                pool.open(second)
            node.barrier()
            node.barrier()
        stream.synchronize()
        assert (copy.get() == 5).all()
        with pytest.raises(HandleError, match="dropped"):
            pool.open(handle)


@TWO
@pytest.mark.parametrize("count", [1 << 10, 1 << 20], ids=["part of a chunk", "large"])
def test_the_owner_reuses_a_block_in_the_order_of_its_stream(node, count, cupy):
    """A block dropped on a held stream, reused on another, is not overwritten before its time."""
    pool = node.pool()
    if node.is_leader:
        first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        copy = cupy.zeros(count, "i4")
        array = pool.allocate(count, "i4", stream=first)
        with first:
            array[...] = 5
        cupy.cuda.Device().synchronize()
        with Latch() as latch:
            latch.hold(first.ptr)
            with first:
                copy[...] = array
            del array
            others = [pool.allocate(count, "i4", stream=second) for _ in range(5)]
            with second:
                for other in others:
                    other[...] = -1
        cupy.cuda.Device().synchronize()
        assert (copy.get() == 5).all()
        del others, other
    node.barrier()


def test_a_pool_smaller_than_a_chunk(node):
    pool = node.pool(max_nbytes=2 * MIB)
    if node.is_leader:
        arrays = [pool.allocate(100, "u1") for _ in range(10)]
        assert len({array.data.ptr for array in arrays}) == 10
    node.barrier()


def test_small_arrays_outnumber_a_chunk(node):
    pool = node.pool()
    count = CHUNK_NBYTES // 4096
    if node.is_leader:
        arrays = [pool.allocate(4096, "u1") for _ in range(3 * count)]
        spans = sorted(array.data.ptr for array in arrays)
        assert all(b - a >= 4096 for a, b in itertools.pairwise(spans))
        for number, array in enumerate(arrays[::count]):
            array[...] = number
        node.synchronize()
    handles = node.comm.bcast(
        [pool.handle(array) for array in arrays[::count]] if node.is_leader else None
    )
    if not node.is_leader:
        opened = [pool.open(handle) for handle in handles]
        assert [int(array[-1]) for array in opened] == list(range(len(handles)))
        del opened
    node.barrier()


@TWO
def test_arrays_of_cupy_travel_where_the_pool_is_its_allocator(node, cupy):
    """Temporaries and views of them, also made and dropped in another thread."""
    import threading

    pool = node.pool()
    if node.is_leader:
        with cupy.cuda.using_allocator(pool.malloc):
            x = cupy.arange(1 << 18, dtype="f8")
            found = (x * 2)[1::2]
            empty = cupy.empty(0)
        made = []

        def make():
            cupy.cuda.Device(node.device.ordinal).use()
            with cupy.cuda.using_allocator(pool.malloc):
                made.append(cupy.full(100, 7.0) + 1)
            cupy.cuda.get_current_stream().synchronize()

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        node.synchronize()
        node.comm.bcast([pool.handle(each) for each in (found, empty, made[0])])
        with pytest.raises(ValueError, match="not an array of the pool"):
            pool.handle(cupy.zeros(3))
        node.barrier()
        made.clear()
        del x, found, empty
    else:
        found, empty, made = (pool.open(each) for each in node.comm.bcast(None))
        assert bool((found == 2 * cupy.arange(1, 1 << 18, 2, dtype="f8")).all())
        assert empty.size == 0
        assert made.tolist() == [8.0] * 100
        with pytest.raises(ValueError, match="is the owner"):
            pool.malloc(8)
        node.synchronize()
        del found, empty, made
        node.barrier()
    pool.close()

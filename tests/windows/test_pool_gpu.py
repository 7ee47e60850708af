"""Pools on GPUs: blocks are reused in the order of streams, also from one GPU to another."""

import gc
import itertools

import pytest

from mpishare import HandleError, UnsupportedError
from tests.helpers.latch import Latch

CHUNK_NBYTES = 8 << 20
TWO = pytest.mark.ranks(min=2)
MIB = 1 << 20


@pytest.fixture(autouse=True)
def on_cuda(node):
    """These tests prove nothing on another backend."""
    assert node.backend == "cuda"


@TWO
@pytest.mark.parametrize("count", [1 << 10, 1 << 20], ids=["part of a chunk", "large"])
def test_a_block_is_held_until_the_work_of_its_stream_is_done(node, count):
    """The importer drops its array while a stream that reads it is held back."""
    import cupy

    pool = node.pool()
    if node.is_leader:
        array = pool.allocate(count, "i4")
        array[...] = 5
        node.synchronize()
        node.comm.bcast(pool.handle(array))
        node.barrier()
        del array
        gc.collect()
        for _ in range(20):  # would overwrite the block, were it given back
            pool.allocate(count, "i4")[...] = -1
        node.synchronize()
        node.barrier()
        node.barrier()
        pool.allocate(1)
        pool._blocks.give_back()
        assert pool._blocks.is_empty
    else:
        handle = node.comm.bcast(None)
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
            node.barrier()
            pool._blocks.settle()
            node.barrier()
            assert not pool._blocks.is_empty
        stream.synchronize()
        assert (copy.get() == 5).all()
        with pytest.raises(HandleError, match="dropped"):
            pool.open(handle)
        node.synchronize()
        pool._blocks.finish()
        assert pool._blocks.is_empty
        node.barrier()


@TWO
@pytest.mark.parametrize("count", [1 << 10, 1 << 20], ids=["part of a chunk", "large"])
def test_the_owner_reuses_a_block_in_the_order_of_its_stream(node, count):
    """A block dropped on a held stream, reused on another, is not overwritten before its time."""
    import cupy

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


def test_no_call_in_a_capture(node):
    import cupy

    pool = node.pool()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        try:
            if node.is_leader:
                with pytest.raises(UnsupportedError, match="captured"):
                    pool.allocate(3)
            else:
                with pytest.raises(UnsupportedError, match="captured"):
                    pool.open(b"")
        finally:
            stream.end_capture()
    node.barrier()


@TWO
def test_arrays_of_a_pool_are_of_this_ranks_gpu(node):
    pool = node.pool()
    array = pool.allocate(10) if node.is_leader else None
    if node.is_leader:
        array[...] = 2
        node.synchronize()
    handle = node.comm.bcast(pool.handle(array) if node.is_leader else None)
    if not node.is_leader:
        array = pool.open(handle)
    assert array.device.id == node.device.ordinal
    assert float((array * 2).sum()) == 40
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
def test_a_limited_pool_is_used_again_and_again(node):
    """Forty times its size goes through it."""
    pool = node.pool(max_nbytes=64 * MIB)
    for number in range(80):
        array = pool.allocate(32 * MIB, "u1") if node.is_leader else None
        if node.is_leader:
            array[...] = number
            node.synchronize()
        handle = node.comm.bcast(pool.handle(array) if node.is_leader else None)
        if not node.is_leader:
            array = pool.open(handle)
        assert int(array[-1]) == number
        node.barrier()
        del array
        if not node.is_leader:
            node.synchronize()
            pool._blocks.finish()
        node.barrier()

"""Pools: what one rank allocates alone, the others open, and nobody reuses before all let go."""

import gc
import importlib
import random

import numpy as np
import pytest

from mpishare import CudaError, HandleError, Node, PeerError, UnsupportedError
from tests.helpers.windows import MIB, nothing_leaked, values_of

TOO_MUCH = 1 << 45  # bytes: 32 TiB
TWO = pytest.mark.ranks(min=2)
LAYOUTS = [((), "f8"), ((0,), "f8"), (5, "u1"), ((3, 0), "i4"), ((2, 3, 4), "c16"), ((7,), "f4")]


def written(node, pool, shape, dtype="f8", value=1):
    """An array of the pool that is filled, when the GPU has come so far. Owner only."""
    array = pool.allocate(shape, dtype)
    array[...] = value
    node.synchronize()
    return array


def written_soon(pool, size, value):
    """An array of the pool that its stream fills."""
    array = pool.allocate(size, "i8")
    array[...] = value
    return array


def handed_out(node, pool, array):
    """The handle of the owner's array, on all ranks. Collective."""
    is_owner = node.rank == pool.owner
    return node.comm.bcast(pool.handle(array) if is_owner else None, root=pool.owner)


def own_and_opened(node, pool, shape, dtype="f8", value=1):
    """The owner's array, opened on all other ranks. Collective."""
    is_owner = node.rank == pool.owner
    mine = written(node, pool, shape, dtype, value) if is_owner else None
    handle = handed_out(node, pool, mine)
    array = mine if is_owner else pool.open(handle)
    node.barrier()
    return array, handle


@pytest.fixture(params=[0, -1], ids=["leader", "last"])
def pool(node, request):
    """A pool of the first rank, and one of the last."""
    return node.pool(owner=request.param % node.size)


def test_what_the_owner_wrote_is_seen_and_written_by_all_others(node, pool):
    array, _ = own_and_opened(node, pool, (node.size, 3), "i4", value=7)
    assert isinstance(array, node.xp.ndarray)
    assert (array.shape, array.dtype) == ((node.size, 3), np.dtype("i4"))
    if node.backend == "cuda":
        assert array.device.id == node.device.ordinal
    assert (values_of(array) == 7).all()
    assert float((array * 2).sum()) == 2 * 7 * 3 * node.size
    node.barrier()
    array[node.rank] = node.rank
    node.synchronize()
    node.barrier()
    assert values_of(array).tolist() == [[rank] * 3 for rank in range(node.size)]
    node.barrier()


@pytest.mark.parametrize(("shape", "dtype"), LAYOUTS, ids=str)
def test_shapes_and_dtypes(node, pool, shape, dtype):
    array, _ = own_and_opened(node, pool, shape, dtype, value=3)
    assert array.shape == (shape if isinstance(shape, tuple) else (shape,))
    assert array.dtype == np.dtype(dtype)
    assert array.flags.c_contiguous
    assert (values_of(array) == 3).all()


@pytest.mark.parametrize(
    "cut",
    [
        lambda a: a[1:, ::2],
        lambda a: a[::-1, 1],
        lambda a: a.T,
        lambda a: a.reshape(-1)[5:],
        lambda a: a.view("i4")[2],
        lambda a: a[2:2],
        lambda a: a[4:, 6:],
    ],
    ids=["strided", "reversed", "transposed", "flat", "other dtype", "empty", "beyond"],
)
def test_a_view_travels_as_it_lies(node, pool, cut):
    is_owner = node.rank == pool.owner
    values = np.arange(24, dtype="i8").reshape(4, 6)
    whole = pool.allocate((4, 6), "i8") if is_owner else None
    if is_owner:
        whole[...] = node.xp.asarray(values)
        node.synchronize()
    handle = handed_out(node, pool, cut(whole) if is_owner else None)
    if not is_owner:
        assert np.array_equal(values_of(pool.open(handle)), cut(values))
    node.barrier()


@TWO
@pytest.mark.timeout(100)
def test_thousands_of_arrays_in_random_order(node):
    """The owner drops arrays, and overwrites what is free, while the others open them.

    The pool has room for a few of the rounds: what leaks is missed soon.
    """
    rounds, count = (12, 1000) if node.backend == "host" and node.size == 2 else (10, 500)
    pool, rng = node.pool(owner=0, max_nbytes=24 * MIB), random.Random(3)
    own_rng, n_opened = random.Random(node.rank), 0
    for number in range(rounds):
        sizes = [rng.randrange(1, 1000) for _ in range(count)]
        order = rng.sample(range(count), count)
        if node.rank == 0:
            arrays = [written_soon(pool, size, number) for size in sizes]
            node.synchronize()
            node.comm.bcast([pool.handle(array) for array in arrays], root=0)
            for index in order[: count // 2]:
                arrays[index] = None
                arrays[index] = written_soon(pool, sizes[index], -1)
            node.synchronize()
        else:
            handles = node.comm.bcast(None, root=0)
            arrays = {}
            for index in own_rng.sample(range(count), count):
                try:
                    arrays[index] = pool.open(handles[index])
                except HandleError:
                    assert index in order[: count // 2]
            n_opened += len(arrays)
            found = [(arrays[index].size, values_of(arrays[index])) for index in arrays]
            assert all((values == number).all() for _, values in found)
            assert [size for size, _ in found] == [sizes[index] for index in arrays]
            node.synchronize()
        node.barrier()
        arrays.clear()
    assert node.rank == 0 or n_opened >= rounds * count // 2


def test_the_wrong_rank(node, pool):
    array, handle = own_and_opened(node, pool, 3)
    if node.rank == pool.owner:
        with pytest.raises(ValueError, match=rf"rank {node.rank} is the owner, and has the array"):
            pool.open(handle)
    else:
        for call in (lambda: pool.allocate(3), lambda: pool.handle(array)):
            with pytest.raises(ValueError, match=rf"rank {pool.owner} is the owner, not .* open"):
                call()
    node.barrier()


def test_handles_of_others(node, pool):
    other = node.pool(owner=pool.owner)
    _, handle = own_and_opened(node, pool, 3)
    if node.rank != pool.owner:
        with pytest.raises(HandleError, match=rf"{other.name}: open failed: .* another pool"):
            other.open(handle)
    node.barrier()


def test_arrays_of_others_have_no_handle(node, pool):
    if node.rank == pool.owner:
        other = pool.allocate(3)
        mine = node.xp.zeros(3)
        for array in (mine, mine.copy(), [1, 2], other + 1):
            with pytest.raises(ValueError, match="not an array of the pool"):
                pool.handle(array)
        stretched = np.lib.stride_tricks.as_strided if node.backend == "host" else None
        if stretched is not None:
            with pytest.raises(ValueError, match="beyond the array"):
                pool.handle(stretched(other, (4,), (8,)))


def test_no_memory_is_an_error_of_the_owner_alone(node, pool):
    kept, _ = own_and_opened(node, pool, 5, value=4)
    if node.rank == pool.owner:
        with pytest.raises((CudaError, UnsupportedError)) as caught:
            pool.allocate(TOO_MUCH, "u1")
        assert "32 TiB were asked for" in str(caught.value)
        if node.backend == "cuda":
            assert caught.value.name == "CUDA_ERROR_OUT_OF_MEMORY"
        else:
            assert str(caught.value).startswith(f"{pool.name}: allocate failed: ")
        del caught
    node.barrier()
    array, _ = own_and_opened(node, pool, 5, value=3)
    assert (values_of(array) == 3).all()
    assert (values_of(kept) == 4).all()


@TWO
def test_a_pool_that_cannot_be_made_on_one_rank(node, monkeypatch):
    backend = importlib.import_module(f"mpishare.backends.{node.backend}")
    kind = backend.CudaBackend if node.backend == "cuda" else backend.HostBackend

    def refuse(*_):
        raise CudaError("no", call="cuMemPool", code=801, name="CUDA_ERROR_NOT_SUPPORTED")

    node.pool().close()  # the door of the owner stays open
    for name, odd in (("create_pool", 0), ("import_pool", node.size - 1)):
        with nothing_leaked(node), monkeypatch.context() as patch:
            if node.rank == odd:
                patch.setattr(kind, name, refuse)
            with pytest.raises(CudaError if node.rank == odd else PeerError):
                node.pool()
    assert node.pool().owner == 0


def test_arrays_outlive_their_pool(node, pool):
    array, _ = own_and_opened(node, pool, 10, value=8)
    with pytest.warns(ResourceWarning, match=pool.name):
        pool.close()
    array[node.rank % 10] = -1
    node.synchronize()
    node.barrier()
    assert values_of(array).tolist().count(-1) == min(node.size, 10)
    node.barrier()


def test_a_pool_leaves_nothing():
    with Node() as node:
        node.pool().close()  # opens the owner's door
        with nothing_leaked(node):
            for _ in range(3):
                pool = node.pool()
                array, _ = own_and_opened(node, pool, 4 * MIB, "u1")
                view = array[:5]
                del array
                with pytest.warns(ResourceWarning, match=pool.name):
                    pool.close()
                del view
                gc.collect()
                node.channel(1).close()  # tries again what a view had held


def test_malloc_is_for_cupy(node, pool):
    if node.rank != pool.owner:
        with pytest.raises(ValueError, match="is the owner"):
            pool.malloc(8)
    elif node.backend == "host":
        with pytest.raises(UnsupportedError, match=r"NEP 49.*pool\.allocate"):
            pool.malloc(8)
    node.barrier()

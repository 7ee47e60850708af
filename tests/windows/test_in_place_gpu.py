"""GPU memory of every kind, shared where it is: by its handle, or refused by its name."""

import gc
from functools import partial

import numpy as np
import pytest

from mpishare import UnsupportedError
from tests.helpers.held import gpu_free, open_files
from tests.helpers.windows import fails_on

TWO = pytest.mark.ranks(min=2)
MIB = 1 << 20
N = 4 * MIB // 4  # float32 elements: 4 MiB


# Each maker returns float32 elements, or what holds them.
def by_cupy(n=N):
    import cupy

    return cupy.zeros(n, "f4")


def inside_a_block(n=N):
    """Neither the first nor the last bytes of what CuPy allocated."""
    return by_cupy(3 * n)[n + 3 : 2 * n + 3]


def by_malloc_async(n=N):
    import cupy

    with cupy.cuda.using_allocator(cupy.cuda.malloc_async):
        return cupy.zeros(n, "f4")


def by_torch(n=N):
    torch = pytest.importorskip("torch")
    return torch.zeros(n, device="cuda", dtype=torch.float32)


def by_torch_expandable(n=N):
    torch = pytest.importorskip("torch")
    configure = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    configure = configure or torch.cuda.memory._set_allocator_settings  # before torch 2.9
    torch.cuda.empty_cache()
    configure("expandable_segments:True")
    try:
        return torch.zeros(n, device="cuda", dtype=torch.float32)
    finally:
        configure("expandable_segments:False")


def several_chunks(n=N):
    """More than the 20 MiB that torch maps at once, and from the middle of the first chunk on."""
    return by_torch_expandable(16 * n)[n + 3 :]


class Freed:
    """Calls a function when it is dropped."""

    def __init__(self, free):
        self.free = free

    def __del__(self):
        self.free()


def array_at(address, n, keep):
    import cupy

    memory = cupy.cuda.UnownedMemory(address, 4 * n, keep)
    return cupy.ndarray(n, "f4", cupy.cuda.MemoryPointer(memory, 0))


_pools = []


def by_pool(n=N):
    """Of a pool made for POSIX file descriptors, as RMM makes one."""
    import cupy

    from mpishare.backends import cuda_pools, driver

    if not _pools:
        _pools.append(cuda_pools.create_pool(cupy.cuda.Device().id, "test"))
    address = int(driver.call("cuMemAllocFromPoolAsync", 4 * n + 512, _pools[0], 0))
    keep = Freed(lambda: driver.call("cuMemFreeAsync", address, 0))
    array = array_at(address, n + 128, keep)[128:]
    array[...] = 0
    return array


_resources = []


def by_cuda_core(n=N):
    core = pytest.importorskip("cuda.core")
    import cupy

    device = core.Device(cupy.cuda.Device().id)
    device.set_current()
    if not _resources:
        options = core.DeviceMemoryResourceOptions(max_size=256 * MIB, ipc_enabled=True)
        _resources.append(core.DeviceMemoryResource(device, options))
    return _resources[0].allocate(4 * n, stream=device.default_stream)


def managed(n=N):
    import cupy

    with cupy.cuda.using_allocator(cupy.cuda.malloc_managed):
        return cupy.zeros(n, "f4")


def pinned(n=N):
    import cupyx

    return cupyx.zeros_pinned(n, "f4")


def pinned_as_cupy(n=N):
    source = pinned(n)
    return array_at(source.ctypes.data, n, source)


def by_numpy(n=N):
    return np.zeros(n, "f4")


def freed(n=N):
    import cupy

    address = cupy.cuda.runtime.malloc(4 * n)
    array = array_at(address, n, None)
    cupy.cuda.runtime.free(address)
    return array


SHARED = [
    by_cupy,
    inside_a_block,
    by_torch,
    by_torch_expandable,
    several_chunks,
    by_pool,
    by_cuda_core,
]
REFUSED = {
    by_malloc_async: "pool without handles",
    managed: "managed memory",
    pinned: "pinned host memory",
    pinned_as_cupy: "pinned host memory",
    by_numpy: "host memory",
}


def as_cupy(source):
    """The same memory as a CuPy array of float32."""
    import cupy

    if isinstance(source, cupy.ndarray):
        return source
    if hasattr(source, "__cuda_array_interface__"):
        return cupy.asarray(source)
    return cupy.from_dlpack(source).view("f4")


def name_of(value):
    return getattr(value, "__name__", repr(value))


def as_floats(array):
    return array if array.dtype == np.float32 else array.view("f4")


@pytest.mark.parametrize("copy", [False, None])
@pytest.mark.parametrize("make", SHARED, ids=name_of)
def test_memory_that_is_shared_in_place(node, make, copy):
    """Every rank writes into its right neighbor's own array, from the first element to the last."""
    source = make()
    mine = as_cupy(source)
    mine[...] = node.rank
    with node.share_each(source, copy=copy) as win:
        assert win.array.data.ptr == mine.data.ptr
        assert win.nbytes == mine.nbytes
        for rank in range(node.size):
            assert bool((as_floats(win.segment(rank)) == rank).all())
        win.fence()
        theirs = as_floats(win.segment((node.rank + 1) % node.size))
        theirs[0], theirs[-1] = 100 + node.rank, 200 + node.rank
        win.fence()
        left = (node.rank - 1) % node.size
        assert mine[[0, 1, -2, -1]].tolist() == [100 + left, node.rank, node.rank, 200 + left]
        del theirs
    assert float(mine[1]) == node.rank  # closing leaves it as it is
    mine[...] = 0


@pytest.mark.parametrize("make", [*SHARED, *REFUSED], ids=name_of)
def test_memory_of_every_kind_can_be_copied(node, make):
    source = make()
    win = node.share_each(source, copy=True)
    assert bool((as_floats(win.array) == 0).all())
    as_floats(win.array)[...] = 5
    node.synchronize()
    values = source if isinstance(source, np.ndarray) else as_cupy(source).get()
    assert not values.any()
    win.fence()


@pytest.mark.parametrize("make", REFUSED, ids=name_of)
def test_memory_that_is_refused(node, make, caplog):
    source = make()
    for call, ranks in ((node.share, [0]), (node.share_each, range(node.size))):
        refused = partial(call, source, copy=False)
        fails_on(node.comm, ranks, UnsupportedError, refused, REFUSED[make], "copy=True")
    win = node.share_each(source, copy=None)
    assert any(REFUSED[make] in record.getMessage() for record in caplog.records)
    assert bool((win.array == 0).all())
    win.fence()


@pytest.mark.parametrize("copy", [True, False, None])
def test_memory_that_was_freed(node, copy):
    """Never touched: that would be the end of the GPU's context."""
    source = freed()
    for call, ranks in ((node.share, [0]), (node.share_each, range(node.size))):
        fails_on(node.comm, ranks, UnsupportedError, partial(call, source, copy=copy), "freed")
    assert node.allocate(2, fill=1).array.tolist() == [1, 1]


@TWO
def test_a_mapping_of_another_ranks_memory(node):
    base = node.allocate_each(4, fill=node.rank)
    theirs = base.segment((node.rank + 1) % node.size)[1:]
    with pytest.warns(ResourceWarning, match=base.name):
        base.close()
    with pytest.raises(UnsupportedError, match="another rank's memory"):
        node.share_each(theirs, copy=False)
    assert node.share_each(theirs).array.tolist() == [(node.rank + 1) % node.size] * 3


@TWO
def test_an_array_of_a_pool_of_the_node(node):
    """By its owner it is shared in place; opened by another rank it is not that rank's to give."""
    pool = node.pool()
    array = pool.allocate(N, "f4") if node.is_leader else None
    if node.is_leader:
        array[...] = 3
    win = node.share(array, copy=False)
    assert bool((win.array == 3).all())
    win.fence()
    win.close()
    handle = node.comm.bcast(pool.handle(array) if node.is_leader else None)
    if not node.is_leader:
        array = pool.open(handle)
    share = partial(node.share, array, owner=1, copy=False)
    fails_on(node.comm, [1], UnsupportedError, share, "another rank's memory")
    del win


def test_memory_of_another_gpu(node, cupy):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU")
    other = (node.device.ordinal + 1) % cupy.cuda.runtime.getDeviceCount()
    with cupy.cuda.Device(other):
        source = cupy.zeros(4)
    with pytest.raises(UnsupportedError, match=f"on GPU {other}"):
        node.share_each(source, copy=False)


@pytest.mark.parametrize("make", SHARED, ids=name_of)
def test_the_owner_drops_the_array_and_empties_the_caches(node, make, cupy):
    def empty():
        gc.collect()
        cupy.get_default_memory_pool().free_all_blocks()
        if make in (by_torch, by_torch_expandable, several_chunks):
            pytest.importorskip("torch").cuda.empty_cache()

    source = make()
    as_cupy(source)[...] = 7 + node.rank
    win = node.share_each(source, copy=False)
    del source
    empty()
    other = make()  # would come to lie at its place
    as_cupy(other)[...] = -1
    win.fence()
    for rank in range(node.size):
        assert bool((as_floats(win.segment(rank)) == 7 + rank).all())
    win.close()
    del win, other
    empty()
    node.barrier()


@pytest.mark.parametrize("make", SHARED, ids=name_of)
def test_the_same_block_twice_and_closed_once(node, make):
    source = make()
    mine = as_cupy(source)
    whole, half = node.share_each(source, copy=False), node.share_each(mine[N // 2 :], copy=False)
    mine[...] = node.rank
    half.fence()
    whole.close()
    right, left = (node.rank + 1) % node.size, (node.rank - 1) % node.size
    half.segment(right)[-1] = 40 + node.rank
    half.fence()
    assert float(mine[-1]) == 40 + left
    again = node.share_each(source, copy=False)
    half.close()
    assert float(as_floats(again.segment(right))[-1]) == 40 + node.rank
    again.close()


def test_two_small_allocations_that_the_driver_puts_into_one_block(node, cupy):
    runtime = cupy.cuda.runtime
    places = [runtime.malloc(512) for _ in range(2)]
    keeps = [Freed(lambda place=place: runtime.free(place)) for place in places]
    arrays = [array_at(place, 128, keep) for place, keep in zip(places, keeps, strict=True)]
    windows = [node.share_each(array, copy=False) for array in arrays]
    for number, array in enumerate(arrays):
        array[...] = 10 * number + node.rank
    windows[0].fence()
    for number, win in enumerate(windows):
        for rank in range(node.size):
            assert win.segment(rank).tolist() == [10 * number + rank] * 128
    windows[0].fence()
    windows[0].close()
    assert windows[1].segment(node.size - 1).tolist() == [10 + node.size - 1] * 128
    windows[1].fence()


@pytest.mark.parametrize("make", [by_cupy, by_pool, by_torch_expandable], ids=name_of)
def test_many_shares_leave_nothing(node, make):
    source = make()
    node.share_each(source, copy=False).close()
    files, free = len(open_files()), gpu_free()
    node.barrier()
    for _ in range(100):
        node.share_each(source, copy=False).close()
    node.barrier()
    assert len(open_files()) < files + 20  # the driver opens some of its own when it likes
    assert gpu_free() >= free - 32 * MIB
    node.barrier()

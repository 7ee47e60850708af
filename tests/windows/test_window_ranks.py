"""Windows: one allocation, every rank's array, and nothing left of what could not be made."""

import gc
from contextlib import nullcontext

import numpy as np
import pytest

from mpishare import CudaError, MismatchError, Node, PeerError, UnsupportedError
from tests.helpers.windows import MIB, nothing_leaked, on_every_rank, put, values_of

DTYPES = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16"]
STRUCTURED = np.dtype([("place", "f8", (3,)), ("id", "i4"), ("name", "S5")])
HOST_DTYPES = [STRUCTURED, "S7", "U3", "M8[us]", "m8[s]", ">f8", "V3", np.longdouble]
SHAPES = [(), (1,), (0,), (5,), (3, 0), (2, 3), (2, 3, 4), (2, 1, 3, 2)]
TOO_MUCH = 1 << 45  # bytes: 32 TiB


def of_bytes(shape, dtype, seed=0):
    """Any bytes will do, but every one counts."""
    dtype = np.dtype(dtype)
    found = (np.arange(int(np.prod(shape, dtype=int)) * dtype.itemsize) + 7 * seed).astype("u1")
    return (found & 1 if dtype.kind == "b" else found).view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", [*DTYPES, *HOST_DTYPES], ids=str)
def test_every_dtype_and_shape_by_every_call(node, host_node, dtype):
    """Also of another shape on each rank."""
    node, owner = node if dtype in DTYPES else host_node, node.size - 1
    for number, shape in enumerate(SHAPES):
        values = of_bytes(shape, dtype)
        shapes = [SHAPES[(number + rank) % len(SHAPES)] for rank in range(node.size)]
        one = node.allocate(shape, dtype, owner=owner)
        copy = node.share(values if node.rank == owner else None, owner=owner)
        each = node.allocate_each(shapes[node.rank], dtype)
        for win, wanted in ((one, shape), (copy, shape), (each, shapes[node.rank])):
            assert win.owner == (None if win is each else owner)
            assert win.array.shape == win.shape == wanted
            assert win.array.dtype == win.dtype == np.dtype(dtype)
            assert win.nbytes == of_bytes(wanted, dtype).nbytes
            assert isinstance(win.array, node.xp.ndarray)
            assert node.backend == "host" or win.array.device.id == node.device.ordinal
            assert win.array.flags.c_contiguous
        if node.rank == 0:
            put(node, one.array, values)
        put(node, each.array, of_bytes(each.shape, dtype, node.rank))
        each.fence()
        for win in (one, copy):
            assert values_of(win.array).tobytes() == values.tobytes()
        for rank, theirs in enumerate(shapes):
            assert each.segment(rank).shape == theirs
            found = values_of(each.segment(rank))
            assert found.tobytes() == of_bytes(theirs, dtype, rank).tobytes()
        each.fence()


@pytest.mark.parametrize(
    ("fill", "dtype"),
    [
        (0, "f8"),
        (-3, "i2"),
        (0.1, "f4"),
        (float("inf"), "f4"),
        (float("nan"), "f8"),
        (3.0, "i4"),
        (True, "?"),
        (1, "?"),
        ("abc", "S3"),
        (np.datetime64("NaT", "s"), "M8[s]"),
        ((1.5, 2), [("a", "f8"), ("b", "i4")]),
        (1.5, "(3,)f8"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("shape", [(2, 3), 0, ()], ids=str)
def test_fill_as_numpy_has_it(node, host_node, shape, fill, dtype):
    node = node if dtype in DTYPES else host_node
    expected = np.zeros(shape, dtype)
    expected[...] = fill
    for call in (node.allocate, node.allocate_each):
        win = call(shape, dtype, fill=fill)
        for rank in range(node.size) if win.owner is None else [win.owner]:
            assert values_of(win.segment(rank)).tobytes() == expected.tobytes()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("fill", "dtype"),
    [
        ("x", "f8"),
        (300, "u1"),
        (-1, "u4"),
        ([1, 2], "f8"),
        ({}, "f8"),
        (1.5, "i4"),
        (float("nan"), "i4"),
        (np.int64(300), "u1"),
        (2, "?"),
        (1e300, "f4"),
        (1j, "f8"),
        (1j, "i4"),
        ("abcd", "U3"),
        (np.datetime64("2026-01-01T00:00:00.5"), "M8[s]"),
        ((1.5, 2, 3), [("a", "f8"), ("b", "i4")]),
    ],
    ids=repr,
)
def test_fill_that_does_not_fit_is_an_error_on_all_ranks(host_node, fill, dtype):
    """Nor one that a cast would change."""
    for call in (host_node.allocate, host_node.allocate_each):
        with pytest.raises(ValueError, match=r"does not fit|must be a scalar"):
            call(3, dtype, fill=fill)
    assert host_node.allocate(1).shape == (1,)


def sources():
    grid = np.arange(12, dtype="i4").reshape(3, 4)
    return {
        "callable": (lambda: grid, grid),
        "list": ([[1, 2], [3, 4]], np.array([[1, 2], [3, 4]])),
        "scalar": (2.5, np.array(2.5)),
        "fortran": (np.asfortranarray(grid), grid),
        "strided": (grid[::2, ::-1], grid[::2, ::-1]),
        "callable with a list": (lambda: [True, False], np.array([True, False])),
    }


@pytest.mark.parametrize("kind", sources())
def test_share(node, kind):
    source, expected = sources()[kind]
    owner = node.size - 1
    win = node.share(source if node.rank == owner else None, owner=owner)
    assert (win.shape, win.dtype, win.owner) == (expected.shape, expected.dtype, owner)
    assert win.array.flags.f_contiguous if kind == "fortran" else win.array.flags.c_contiguous
    assert np.array_equal(values_of(win.array), expected)


class OwnError(Exception):
    pass


def test_callable_that_raises(node):
    def fail():
        raise OwnError("the file is missing")

    owner = node.size - 1
    own = OwnError if node.rank == owner else PeerError
    with nothing_leaked(node), pytest.raises(own) as caught:
        node.share(fail, owner=owner)
    if node.rank != owner:
        assert caught.value.failures == {owner: "OwnError: the file is missing"}
    assert values_of(node.share([1, 2]).array).tolist() == [1, 2]


def is_no_memory(error):
    if isinstance(error, CudaError):
        return error.name == "CUDA_ERROR_OUT_OF_MEMORY" and error.call == "cuMemAlloc"
    return isinstance(error, UnsupportedError) and (
        "--shm-size" in str(error) or "of memory left" in str(error)
    )


def too_large(node):
    """Calls for more memory than some ranks have, and these ranks."""
    last = node.size - 1
    nbytes = TOO_MUCH if node.rank == last else 8 * MIB
    return {
        "leader": (lambda: node.allocate(TOO_MUCH, "u1"), [0]),
        "last": (lambda: node.allocate(TOO_MUCH, "u1", owner=last), [last]),
        # The array itself takes no room: one element, repeated.
        "shared": (lambda: node.share(np.broadcast_to(np.uint8(1), (TOO_MUCH,))), [0]),
        # What the other ranks have allocated by then is freed.
        "one segment": (lambda: node.allocate_each(nbytes, "u1", fill=1), [last]),
        "all segments": (lambda: node.allocate_each(TOO_MUCH, "u1"), [*range(node.size)]),
    }


@pytest.mark.parametrize("kind", ["leader", "last", "shared", "one segment", "all segments"])
def test_more_than_there_is(node, kind):
    work, ranks = too_large(node)[kind]
    with nothing_leaked(node):
        for _ in range(3):
            error, _ = on_every_rank(node, work)
            if node.rank in ranks:
                assert is_no_memory(error), repr(error)
            else:
                assert type(error) is PeerError
                assert error.ranks == tuple(ranks)
                assert "32 TiB" in error.failures[ranks[0]]
            del error
    win = node.allocate_each(8 * MIB, "u1", fill=node.rank)
    assert int(win.segment(node.size - 1)[-1]) == node.size - 1


def test_view_outlives_its_window(node):
    win = node.allocate_each(4, "i4", fill=node.rank)
    views = [win.segment(rank)[1:3] for rank in range(node.size)]
    with pytest.warns(ResourceWarning, match=win.name):
        win.close()
    # New windows take none of its place.
    node.allocate_each(4, "i4", fill=-1)
    found = [values_of(view).tolist() for view in views]
    assert found == [[rank, rank] for rank in range(node.size)]
    node.barrier()
    views[node.rank][...] = 50 + node.rank
    node.synchronize()
    node.barrier()
    found = [values_of(view).tolist() for view in views]
    assert found == [[50 + rank] * 2 for rank in range(node.size)]
    node.barrier()


def test_memory_goes_with_the_last_view():
    with Node() as node:
        node.allocate_each(1).close()
        with nothing_leaked(node):
            win = node.allocate_each(4 * MIB, "u1", fill=1)
            view = win.array[:10]
            with pytest.warns(ResourceWarning, match=win.name):
                win.close()
            assert int(view[3]) == 1
            del view
            gc.collect()
            node.channel(1).close()  # tries again what a view had held


def test_more_windows_at_once_than_the_control_block_has_counters_for(node):
    count = 300
    with nothing_leaked(node), Node(node.comm, backend=node.backend) as own:
        windows = [own.allocate_each(2, "i8", fill=0) for _ in range(count)]
        for step in (1, 2):
            for number, win in enumerate(windows):
                win.array[...] = 1000 * step + number
                win.fence()
            for number, win in enumerate(windows):
                found = {int(win.segment(rank)[0]) for rank in range(own.size)}
                assert found == {1000 * step + number}
                win.fence()
            for win in windows[::2]:
                win.close()
            windows[::2] = [own.allocate_each(2, "i8", fill=0) for _ in windows[::2]]
        del win, windows


def test_augmented_assignment_writes_into_the_window(node):
    """What would write elsewhere, or nowhere, is refused with the right form."""
    win = node.allocate_each(4, "i8", fill=3)
    win.array += 1
    win.array *= 2
    with pytest.raises(AttributeError, match=r"window.array\[...\] = values"):
        win.array = np.zeros(4)
    with pytest.raises(TypeError, match=r"is a window, not an array: read window.array\[\.\.\.\]"):
        win[0]
    with pytest.raises(TypeError, match=r"write window.array\[\.\.\.\] = values"):
        win[0] = 5
    win.fence()
    for rank in range(node.size):
        assert values_of(win.segment(rank)).tolist() == [8] * 4
    win.fence()


def test_a_window_is_no_array_to_compute_with(node):
    win, two = node.allocate_each(4, "i8", fill=3), 2
    for compute in (
        lambda: win + 1,
        lambda: two * win,
        lambda: win**two,
        lambda: win / win,
        lambda: win @ win,
    ):
        with pytest.raises(TypeError, match=rf"^{win.name} is a window, .*compute with window"):
            compute()
    with pytest.raises(TypeError, match="compute with window"):
        win -= 1
    if node.backend == "host":
        assert (np.ones(4) + win).tolist() == [4] * 4  # as NumPy reads it
        assert np.sum(win) == 12


def test_numpy_sees_the_memory_of_a_window_or_is_refused(node):
    win = node.allocate((2, 3), "f4", fill=1)
    if node.backend == "cuda":
        with pytest.raises(TypeError, match=rf"{win.name} is in GPU memory.*window.array.get\(\)"):
            np.asarray(win)
        return
    seen = np.asarray(win)
    assert seen.dtype == np.dtype("f4")
    assert np.shares_memory(seen, win.array)
    assert np.array(win).tolist() == [[1, 1, 1]] * 2
    assert not np.shares_memory(np.array(win), win.array)
    assert np.asarray(win, dtype="f8").dtype == np.dtype("f8")
    del seen


def test_dlpack_of_a_window_is_the_same_memory(node):
    win = node.allocate(6, "i4", fill=3)
    assert win.__dlpack_device__() == win.array.__dlpack_device__()
    seen = node.xp.from_dlpack(win)
    assert seen.tolist() == [3] * 6
    node.barrier()
    if node.is_leader:
        win.array[2] = 9
    win.fence()
    node.synchronize()
    assert seen.tolist() == [3, 3, 9, 3, 3, 3]
    del seen


def test_the_cuda_array_interface_is_there_on_gpus_alone(node):
    win = node.allocate((2, 2), "f8", fill=5)
    assert hasattr(win, "__cuda_array_interface__") == (node.backend == "cuda")
    if node.backend == "host":
        return
    seen = node.xp.asarray(win)
    assert seen.data.ptr == win.array.data.ptr
    # What was made of the interface holds the window alone: its memory stays.
    with pytest.warns(ResourceWarning, match=win.name):
        win.close()
    assert seen.tolist() == [[5, 5], [5, 5]]
    node.barrier()


def test_small_windows_of_any_number_share_no_element(host_node):
    """More than one file has room for, of sizes that differ between ranks, some of them large."""
    node = host_node
    sizes = [1, 40_000, 150_000][: 1 + node.rank % 3]
    made = [node.allocate_each(size, "u8", fill=node.rank) for size in sizes * (6 // len(sizes))]
    made += [node.allocate(130_000, "u8", fill=n) for n in range(20)]
    found = [(win.segment(rank), rank) for win in made[:6] for rank in range(node.size)]
    found += [(win.array, number) for number, win in enumerate(made[6:])]
    assert all((array == value).all() for array, value in found)
    node.barrier()
    for array, value in found[node.rank :: node.size]:
        array += 1000 + value
    node.barrier()
    assert all((array == 1000 + 2 * value).all() for array, value in found)
    node.barrier()


def test_a_small_window_is_not_reused_while_one_rank_has_an_array(host_node):
    node = host_node
    win = node.allocate(8, fill=7)
    view = win.array[2:4] if node.rank == node.size - 1 else None
    with pytest.warns(ResourceWarning, match=win.name) if view is not None else nullcontext():
        win.close()
    for _ in range(3):
        node.allocate(8, fill=-1).close()
    assert view is None or view.tolist() == [7, 7]
    del view
    node.barrier()


@pytest.mark.ranks(min=2)
def test_arguments_that_differ_take_no_memory_of_small_windows(host_node):
    node, last = host_node, host_node.size - 1
    node.allocate(8).close()  # maps it
    with nothing_leaked(node):
        for _ in range(40):  # of 1 MiB each: more than there is room for
            with pytest.raises(MismatchError):
                node.allocate(MIB, "u1", fill=min(node.rank, 1), owner=last)
        array = node.allocate(MIB, "u1", fill=3, owner=last).array
    assert (array == 3).all()
    node.barrier()


def test_a_small_window_is_shared_in_place_by_its_own_node_alone(host_node):
    """Another node would not be asked before its memory becomes that of another window."""
    node = host_node
    win = node.allocate(8, fill=7)
    mine = win.array if node.rank == 0 else None
    assert (node.share(mine, copy=False).array == 7).all()
    with Node(node.comm, backend="host") as other:
        with pytest.raises((UnsupportedError, PeerError), match="window of another node"):
            other.share(mine, copy=False)
        assert (other.share(mine, copy=True).array == 7).all()


def test_closed_small_windows_with_arrays_do_not_pile_up(host_node):
    node = host_node
    held = []
    for _ in range(300):
        win = node.allocate(8)
        held = [win.array]
        with pytest.warns(ResourceWarning, match=win.name):
            win.close()
    assert len(held) == 1
    assert len(node._context.retained) < 150
    node.barrier()


def test_records_of_equal_dtypes_may_be_aligned_on_one_rank(host_node):
    kind = np.dtype([("a", "i4")], align=host_node.rank == 0)
    with Node(host_node.comm.Split(host_node.rank), backend="host") as alone:
        alone.allocate(3, kind)
    assert host_node.allocate(3, [("a", "i4")]).nbytes == 12
    host_node.barrier()

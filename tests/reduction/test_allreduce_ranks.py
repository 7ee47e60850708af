"""Allreduce: the fold in the order of the ranks, to the bit, on every rank and at every call."""

import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mpi4py import MPI

import mpishare
from mpishare import Allreduce, ClosedError, EpochError, Layout, MismatchError, PeerError
from mpishare.reduction import host, large, slots
from mpishare.reduction.operation import OPERATIONS
from tests.helpers.halos import some
from tests.helpers.reductions import (
    COMPLEX,
    FLOATS,
    FORMS,
    INTS,
    expected,
    folded,
    laid_out,
    on_host,
    pairs,
    values,
)

TWO = pytest.mark.ranks(min=2)
SHAPES = [(), (0,), (1,), (3,), (128,), (3, 0), (5, 7), (2, 3, 4)]
OTHERS = r"(rank 1|the other \d ranks)"
LARGE = [1000, 20_000, 100_000, 300_001]


def reduced(node, total, array):
    """What `reduce` makes of it, when the stream has come so far."""
    total.reduce(array)
    node.synchronize()
    return on_host(array)


def same_bits(found, wanted):
    return found.dtype == wanted.dtype and found.tobytes() == np.ascontiguousarray(wanted).tobytes()


def on_all(node, found, wanted):
    """Every rank has it, to the bit; a failure on one rank is one on all."""
    return all(node.comm.allgather(same_bits(found, wanted)))


def window_of(node, array):
    """The same values in a window."""
    win = node.allocate_each(array.shape, array.dtype)
    win.array[...] = node.xp.asarray(array)
    return win


@pytest.mark.parametrize(("op", "dtype"), pairs())
def test_operations(node, op, dtype):
    mine = values(dtype, (129,), node.rank)
    wanted = expected(op, dtype, (129,), node.size)
    x = node.xp.array(mine)
    with Allreduce(node.comm, x, op, node=node) as total:
        for _ in range(3):  # on a GPU launched, as a graph, and by the fast path
            x[...] = node.xp.asarray(mine)
            assert on_all(node, reduced(node, total, x), wanted)


def is_sum(node, array, kind="f8"):
    """Whether a new plan gives what NumPy does, to the bit, on every rank."""
    with Allreduce(node.comm, array, node=node) as total:
        found = reduced(node, total, array)
    return on_all(node, found, expected("sum", kind, found.shape, node.size))


@pytest.mark.parametrize("place", ["private", "window", "one in a window"])
@pytest.mark.parametrize("count", LARGE)
def test_large(node, count, place):
    """Private arrays are read, or go through slots; windows may be reduced where they are."""
    mine = values("f8", (count,), node.rank)
    array = node.xp.asarray(mine)
    if place != "private":
        window = window_of(node, mine)
        array = window.array if place == "window" or node.rank == 0 else array
    assert is_sum(node, array)


def small_blocks(monkeypatch):
    """Let a few elements be a large field, cut into several chunks and reads."""
    for module, name, nbytes in (
        (slots, "_BARRIER_NBYTES", 8),
        (slots, "_SLOT_NBYTES", 2048),
        (large, "_MIN_IN_PLACE_NBYTES", 8),
        (large, "_MAX_SLOT_NBYTES", 2048),
        (large, "_READ_NBYTES", 512),
    ):
        monkeypatch.setattr(module, name, nbytes)


@pytest.fixture
def reads(monkeypatch):
    """The addresses that are read from other processes."""
    found, read = [], large.read_memory
    monkeypatch.setattr(large, "read_memory", lambda *at: (found.append(at[1]), read(*at))[1])
    return found


@TWO
@pytest.mark.parametrize(("op", "dtype"), pairs())
@pytest.mark.parametrize("may_read", [True, False], ids=["reads", "chunks"])
def test_operations_on_private_arrays(host_node, monkeypatch, reads, op, dtype, may_read):
    node, shape = host_node, (5003,)
    small_blocks(monkeypatch)
    monkeypatch.setattr(large, "_MAX_READERS", node.size - (not may_read))
    mine, wanted = values(dtype, shape, node.rank), expected(op, dtype, shape, node.size)
    x = mine.copy()
    with Allreduce(node.comm, x, op, node=node) as total:
        for _ in range(2):
            x[...] = mine
            assert on_all(node, reduced(node, total, x), wanted)
    can_read = may_read and not node.report().unreadable
    assert bool(reads) == can_read


@TWO
@pytest.mark.parametrize("place", ["window", "hidden"])
def test_private_arrays_beside_another_one(host_node, monkeypatch, reads, place):
    """The last rank's field is in a window, or nobody can read it."""
    node, count = host_node, 5003
    small_blocks(monkeypatch)
    x = values("f8", (count,), node.rank)
    window = window_of(node, x)
    if node.rank == node.size - 1:
        x = window.array if place == "window" else x
        if place == "hidden":
            monkeypatch.setattr(large, "_is_readable", lambda *_: False)
    with Allreduce(node.comm, x, node=node) as total:
        assert on_all(node, reduced(node, total, x), expected("sum", "f8", (count,), node.size))
    may_read = place == "window" and not node.report().unreadable
    assert any(node.comm.allgather(bool(reads))) == may_read


@pytest.mark.parametrize("dtype", ["f2", "i1", "c16"])
def test_large_windows_of_other_dtypes(node, dtype):
    count = 1_400_001 // np.dtype(dtype).itemsize  # of 1 MiB and more; /dev/shm may have 64
    window = window_of(node, values(dtype, (count,), node.rank))
    assert is_sum(node, window.array, dtype)


def test_parts_of_one_window(node):
    """Fields in one segment, side by side."""
    win = node.allocate((node.size, 140_000))
    win.array[node.rank] = node.xp.asarray(values("f8", (140_000,), node.rank))
    win.fence()
    assert is_sum(node, win.array[node.rank])
    node.barrier()


@pytest.mark.parametrize("shape", SHAPES)
def test_reduce_returns_its_array(node, shape):
    x, window = node.xp.ones(shape), node.allocate_each(shape, fill=1.0)
    with Allreduce(node.comm, x, node=node) as total:
        for given in (x, window, x):  # first by the slow way, and a window for its array
            assert total.reduce(given) is given


def test_what_lies_between_is_left(node):
    base = node.xp.full((9, 9), 5.0)
    field = base[1::2, 1::2]
    field[...] = 1.0
    with Allreduce(node.comm, field, node=node) as total:
        total.reduce(field)
        node.synchronize()
    wanted = np.full((9, 9), 5.0)
    wanted[1::2, 1::2] = node.size
    assert on_all(node, on_host(base), wanted)


@settings(
    deadline=None,
    derandomize=True,  # all ranks draw the same, and fail alike
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    pair=st.sampled_from(pairs()),
    shape=st.lists(st.integers(0, 40), max_size=3).map(tuple),
    forms=st.lists(st.sampled_from(FORMS), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_any(node, pair, shape, forms, seed):
    op, dtype = pair
    mine = values(dtype, shape, node.rank, seed)
    field = laid_out(node.xp, mine, forms[node.rank % len(forms)])
    with Allreduce(node.comm, field, op, node=node) as total:
        found = reduced(node, total, field)
    assert on_all(node, found, expected(op, dtype, shape, node.size, seed))


def is_folded(node, op, each):
    """Whether all ranks get their combination; one NaN is as good as another, and -0.0 is 0.0."""
    mine = node.xp.array(each[node.rank])
    with Allreduce(node.comm, mine, op, node=node) as total:
        found = reduced(node, total, mine)
    with np.errstate(invalid="ignore"):  # NumPy knows no NaN of ml_dtypes
        found, wanted = (
            array.view(array.real.dtype) if array.dtype.kind == "c" else array.astype("f8")
            for array in (found, folded(op, [*each]))
        )
    return all(node.comm.allgather(np.array_equal(found, wanted, equal_nan=True)))


@pytest.mark.parametrize("op", ["sum", "max", "min", "prod"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_and_infinity(node, op, dtype):
    """A NaN of any rank is a NaN on all; an overflow neither warns nor raises."""
    each = np.array([[1, 2, np.inf, -np.inf, np.finfo(dtype).max]] * node.size, dtype)
    each[-1, 0] = np.nan
    assert is_folded(node, op, each)


@pytest.mark.parametrize("op", ["sum", "prod", "max", "min"])
@pytest.mark.parametrize("count", [600, LARGE[-1]])
def test_bfloat16(host_node, op, count):
    """Every pattern of bits, rounded at each rank as ml_dtypes does."""
    node, dtype = host_node, np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    rng = np.random.default_rng(6)
    assert is_folded(node, op, rng.integers(0, 1 << 16, (node.size, count), "u2").view(dtype))


@pytest.mark.parametrize("op", ["maxloc", "minloc"])
@pytest.mark.parametrize("count", [600, LARGE[-1]])
def test_where_the_largest_and_the_smallest_are(node, op, count):
    """Of equal values the lowest index, and of NaNs, whichever rank has it; -0.0 is 0.0."""
    rng = np.random.default_rng(4)
    each = np.empty((node.size, count), complex)
    each.real = rng.choice([-np.inf, -1.0, -0.0, 0.0, 2.0, np.inf, np.nan], each.shape)
    each.imag = rng.permuted(np.indices(each.shape)[0], axis=0)
    assert is_folded(node, op, each)


def test_an_overflow_raises_nowhere(host_node):
    """Whatever the user's errstate: else it would raise on the ranks that fold these elements."""
    with np.errstate(all="raise"), Allreduce(host_node.comm, Layout(3), node=host_node) as total:
        x = np.full(3, np.finfo(float).max)
        total.reduce(x)
        assert all(host_node.comm.allgather(x[0] == (x[0] if host_node.size == 1 else np.inf)))
        large = np.full(3, 1e200)
        assert float(total.dot(large, large)) == np.inf


@pytest.mark.parametrize("dtype", [*INTS, *FLOATS, *COMPLEX])
def test_dot(node, dtype):
    shape = (9, 4)
    x, y = (values(dtype, shape, node.rank, seed) for seed in (1, 2))
    with Allreduce(node.comm, Layout(3, dtype), node=node) as total:
        found = total.dot(node.xp.asarray(x), node.xp.asarray(y))
        assert (found.shape, found.dtype) == ((), np.dtype(dtype))
        found = on_host(found)
    both = [[values(dtype, shape, rank, seed) for seed in (1, 2)] for rank in range(node.size)]
    if np.dtype(dtype).kind in "iu":
        right = found == folded("sum", [np.sum(a * b, dtype=dtype) for a, b in both])
    else:
        wanted = sum(np.sum(a.conj().astype("c16") * b) for a, b in both)
        scale = sum(np.sum(np.abs(a.astype("c16") * b)) for a, b in both)
        rtol = {"f2": 2e-2, "f4": 1e-5, "c8": 1e-5}.get(dtype, 1e-13)
        right = abs(found - wanted) <= rtol * scale or not np.isfinite(found)
    assert all(node.comm.allgather(bool(right)))
    assert len(set(node.comm.allgather(found.tobytes()))) == 1


@pytest.mark.parametrize("form", FORMS)
def test_dot_of_other_numbers_of_elements(node, form):
    """Each rank has as many as it likes; one has none."""
    shape = (node.rank, 200, 50)
    x = laid_out(node.xp, np.ones(shape), form)
    y = laid_out(node.xp, np.full(shape, 3.0), "C")
    with Allreduce(node.comm, Layout(1), node=node) as total:
        out = node.xp.zeros((1, 1))
        assert total.dot(x, y, out=out) is out
        node.synchronize()
        wanted = 3.0 * 10_000 * sum(range(node.size))
        assert all(node.comm.allgather(float(on_host(out)[0, 0]) == wanted))


@pytest.mark.parametrize("dtype", ["f2", "i2", "f8"])
def test_dot_of_a_plan_for_no_elements(host_node, dtype):
    x = np.full(3, host_node.rank + 1, dtype)
    with Allreduce(host_node.comm, Layout(0, dtype), node=host_node) as total:
        wanted = 3 * sum((rank + 1) ** 2 for rank in range(host_node.size))
        assert all(host_node.comm.allgather(int(total.dot(x, x)) == wanted))


def test_many_calls_with_delays(node):
    """Reductions and dots in turn, of new values, while ranks sleep where they like."""
    rng = np.random.default_rng([node.rank, 17])
    right = True
    with Allreduce(node.comm, Layout(40), node=node) as total:
        for step in range(some(node, 1000)):
            x = node.xp.asarray(values("f8", (40,), node.rank, step))
            if rng.random() < 0.05:
                time.sleep(rng.random() * 0.004)
            if step % 3 == 2:
                found, wanted = on_host(total.dot(x[:1], x[:1])), None
                every = [values("f8", (40,), rank, step)[0] for rank in range(node.size)]
                wanted = folded("sum", [np.asarray(each * each) for each in every])
            else:
                found = reduced(node, total, x)
                wanted = expected("sum", "f8", (40,), node.size, step)
            right = right and same_bits(found, np.asarray(wanted))
            x[...] = -1.0  # overwritten at once: nobody may still read it
    assert all(node.comm.allgather(right))


@pytest.mark.parametrize("in_window", [False, True], ids=["private", "window"])
def test_large_ones_may_be_overwritten_at_once(node, in_window):
    count, right = 140_000, True
    wanted = expected("sum", "f8", (count,), node.size)
    mine = node.xp.asarray(values("f8", (count,), node.rank))
    array = node.allocate_each(count).array if in_window else node.xp.empty(count)
    with Allreduce(node.comm, array, node=node) as total:
        for step in range(12):
            array[...] = mine
            if (step + node.rank) % 3 == 0:
                time.sleep(0.002)
            total.reduce(array)
            kept = array.copy()
            array[...] = -1.0
            node.synchronize()
            right = right and same_bits(on_host(kept), wanted)
    assert all(node.comm.allgather(right))


@pytest.mark.ranks(min=3)
def test_some_ranks_in_another_order(node):
    """The order is that of the given communicator."""
    color = MPI.UNDEFINED if node.rank == 1 else 0
    part = node.comm.Split(color, -node.rank)
    if node.rank != 1:
        ranks = [rank for rank in reversed(range(node.size)) if rank != 1]
        mine = values("f4", (50,), node.rank)
        with Allreduce(part, node.xp.asarray(mine), node=node) as total:
            found = reduced(node, total, node.xp.asarray(mine))
        assert same_bits(found, folded("sum", [values("f4", (50,), rank) for rank in ranks]))
        part.Free()
    node.barrier()


def raises_on_all(node, kind, text, call):
    with pytest.raises(kind, match=text):
        call()
    node.barrier()


@pytest.mark.parametrize(
    ("dtype", "op", "kind", "text"),
    [
        ("f8", "mean", ValueError, "op must be one of 'sum', .*, not 'mean'"),
        ("f8", MPI.REPLACE, TypeError, "op must be one of 'sum', .*, not <mpi4py"),
    ],
)
def test_what_cannot_be_reduced(node, monkeypatch, dtype, op, kind, text):
    monkeypatch.setitem(OPERATIONS, "first", OPERATIONS["max"])  # MPI has none of that name
    raises_on_all(node, kind, text, lambda: Allreduce(node.comm, Layout(3, dtype), op, node=node))


@pytest.mark.parametrize("wrong", [None, 3.0, [1.0, 2.0]])
def test_no_array(node, wrong):
    made = "^Allreduce failed: like is not an array"
    raises_on_all(node, TypeError, made, lambda: Allreduce(node.comm, wrong, node=node))


@TWO
@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        ((Layout(3), "sum"), (Layout(4), "sum"), rf"rank 0: shape=\[3\]; {OTHERS}: shape"),
        ((Layout(3), "sum"), (Layout(3, "f4"), "sum"), "dtypes="),
        ((Layout(3), "sum"), (Layout(3), "max"), rf"rank 0: op='sum'; {OTHERS}: op='max'"),
    ],
)
def test_ranks_that_disagree(node, one, other, text):
    given = other if node.rank else one
    raises_on_all(node, MismatchError, text, lambda: Allreduce(node.comm, *given, node=node))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda xp: xp.zeros(4), "shape"),
        (lambda xp: xp.zeros(3, "f4"), "dtype"),
        (lambda xp: xp.zeros(6)[::2], "strides"),
        (lambda _: [1.0, 2.0, 3.0], "not an array"),
    ],
)
def test_another_array(node, make, text):
    """Nothing was done: the next call is right."""
    with Allreduce(node.comm, Layout(3), node=node) as total:
        with pytest.raises((TypeError, ValueError), match=text) as caught:
            total.reduce(make(node.xp))
        assert str(caught.value).startswith(f"{total.name}: reduce failed: x ")
        assert "Layout.any" not in str(caught.value)
        assert reduced(node, total, node.xp.ones(3))[0] == node.size


def test_a_read_only_array(host_node):
    x = np.ones(3)
    x.flags.writeable = False
    with Allreduce(host_node.comm, Layout(3), node=host_node) as total:
        with pytest.raises(ValueError, match="read-only"):
            total.reduce(x)
        assert float(total.dot(x, x)) == 3 * host_node.size  # which only reads
        with pytest.raises(ValueError, match="read-only"):
            total.dot(x, x, out=x[:1])
        host_node.barrier()


def test_dot_of_what_does_not_fit(node):
    xp = node.xp
    with Allreduce(node.comm, Layout(3), node=node) as total:
        for x, y, out, text in (
            (xp.ones(3), xp.ones(4), None, "must be the same"),
            (xp.ones(3), xp.ones(3, "f4"), None, "dtype float32 instead of float64"),
            (xp.ones(3), xp.ones(3), xp.ones(2), "one element"),
            (xp.ones(3), xp.ones(3), xp.ones(1, "f4"), "dtype"),
        ):
            with pytest.raises(ValueError, match=text):
                total.dot(x, y, out)
        assert float(total.dot(xp.ones(3), xp.ones(3))) == 3 * node.size


@TWO
@pytest.mark.parametrize("count", [3, 1 << 17])
def test_reduce_meets_dot(host_node, count):
    """Where each rank folds all elements, and where the ranks share the work: the node is over."""
    comm, x = host_node.comm, np.ones(count)
    assert slots.folds_all(comm.size, x.nbytes) == (count == 3)
    node = mpishare.Node(comm, backend="host")
    total = Allreduce(comm, x, node=node)
    call = (lambda: total.reduce(x)) if node.rank else (lambda: total.dot(x, x))
    told = rf"rank 0: dot; {OTHERS}: reduce"
    with pytest.raises(MismatchError, match=told):
        call()
    for each in (lambda: total.reduce(x), node.barrier):
        with pytest.raises(PeerError, match=told):  # or that of a rank that was faster
            each()
    node.close()
    comm.Barrier()


@pytest.mark.parametrize("is_by_node", [False, True])
def test_closed(node, is_by_node):
    x = node.xp.ones(3)
    with mpishare.Node(node.comm, backend=node.backend) as other:
        total = Allreduce(node.comm, x, node=other)
        assert repr(total).startswith(f"<mpishare.{total.name}: sum of float64(3,) over ")
        assert not total.is_closed
        if not is_by_node:
            total.close()
    total.close()
    assert total.is_closed
    assert "closed" in repr(total)
    for call in (lambda: total.reduce(x), lambda: total.dot(x, x)):
        raises_on_all(node, ClosedError, "closed", call)


@pytest.mark.parametrize("call", ["reduce", "dot"])
def test_a_plan_that_is_called_or_closed_in_its_own_call(host_node, monkeypatch, call):
    """As by a handler of a signal: the others would take that for this rank's next call."""
    x, other, again = np.full(3, 2.0), np.ones(3), []
    quietly = host.quiet_runner()

    def interrupted(work, *arrays):
        for each in again:
            with pytest.raises(EpochError, match="handler of a signal"):
                each()
        quietly(work, *arrays)

    monkeypatch.setattr(host, "quiet_runner", lambda: interrupted)
    with Allreduce(host_node.comm, x, node=host_node) as total:
        again += lambda: total.reduce(other), lambda: total.dot(other, other), total.close
        found = total.dot(x, x) if call == "dot" else total.reduce(x)
        again.clear()
        assert np.all(found == (12.0 if call == "dot" else 2.0) * host_node.size)
        with pytest.raises(ValueError, match="dtype"):
            total.dot(x.astype("f4"), x)
        assert total.dot(other, other) == 3 * host_node.size  # errors end a call, too

"""Reductions on GPUs: sizes, dtypes, streams, graphs. For every backend: test_allreduce_ranks.py.

Most of these never let the host look between the steps: kernels write what depends on the step,
others count what is wrong, and the host reads the count at the end.
"""

import functools
from types import SimpleNamespace

import numpy as np
import pytest

import mpishare
from mpishare import Allreduce, Layout, UnsupportedError
from tests.helpers.captures import captured, skip_where_ranks_take_turns
from tests.helpers.counted import Counted
from tests.helpers.latch import Latch, check_order
from tests.helpers.reductions import every_operation, folded, values

TWO = pytest.mark.ranks(min=2)
SMALL, LARGE = 300, 40_003  # elements: sent to everybody, and by slices
SOURCE = r"""
extern "C" {
__global__ void put(double* x, long long n, int rank, const long long* step) {
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n;
       i += (long long)gridDim.x * blockDim.x)
    x[i] = (rank + 1) * 0.1 + i * 0.3 + *step * 0.7;
}
__global__ void count(const double* x, long long n, int ranks, const long long* step,
                      unsigned long long* errors) {
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n;
       i += (long long)gridDim.x * blockDim.x) {
    double right = 0.1 + i * 0.3 + *step * 0.7;
    for (int rank = 1; rank < ranks; ++rank)
      right = right + ((rank + 1) * 0.1 + i * 0.3 + *step * 0.7);
    if (x[i] != right) atomicAdd(errors, 1ULL);
  }
}
__global__ void check_sum(const double* x, double right, unsigned long long* errors) {
  if (*x != right) atomicAdd(errors, 1ULL);
}
}
"""


pytestmark = pytest.mark.usefixtures("few_are_small")


@pytest.fixture
def few_are_small(monkeypatch):
    """Fields of SMALL elements alone go to everybody as they are."""
    from mpishare.reduction.cuda import spinning

    monkeypatch.setattr(spinning, "SMALL_NBYTES", 32 << 10)


@pytest.fixture(params=["", "pinned"], ids=["own", "pinned"])
def kernel_route(request, node, monkeypatch):
    """What the plan chooses, and memory of the host, where kernels wait for other ranks."""
    skip_where_ranks_take_turns(node)
    if request.param:
        monkeypatch.setenv("MPISHARE_ROUTE", request.param)


class CountedField(Counted):
    """A field of doubles, with kernels that write it and count what is wrong after `reduce`."""

    def __init__(self, node, count):
        import cupy

        # As the kernels of mpishare: a contracted product would differ in the last bit.
        super().__init__(SOURCE, "put", "count", "check_sum", options=("--fmad=false",))
        self.array = cupy.zeros(count)
        self._rank, self._size, self._n = np.int32(node.rank), np.int32(node.size), np.int64(count)
        self.put()
        self.count()
        self.check_sum(self.array, 0.0)
        self.forget()

    def put(self):
        self._put((8,), (128,), (self.array, self._n, self._rank, self.step))

    def count(self):
        self._count((8,), (128,), (self.array, self._n, self._size, self.step, self.errors))

    def check_sum(self, x, right):
        self._check_sum((1,), (1,), (x, np.float64(right), self.errors))

    def reduce_by(self, total, **options):
        """One step, whose values depend on how many there were."""
        self.put()
        total.reduce(self.array, **options)
        self.count()
        self.go_on()


def is_right(found, right):
    """The same bits, or any NaN where there is one."""
    return bool(((found == right) | ((found != found) & (right != right))).all())


def test_every_operation_on_slices(node, cupy):
    """Of every size of an element one dtype, and complex ones: each is a kernel to compile."""
    for operation in every_operation("BefD"):
        fields = [values(operation.dtype, (LARGE,), rank) for rank in range(node.size)]
        if operation.dtype.kind == "f":
            for rank, field in enumerate(fields):
                field[rank::97] = np.nan
        x = cupy.asarray(fields[node.rank])
        with Allreduce(node.comm, x, operation.name, node=node) as total:
            for _ in range(3):  # launched, as a graph, and by the fast path
                x[...] = cupy.asarray(fields[node.rank])
                total.reduce(x)
                assert is_right(x.get(), folded(operation.name, fields)), operation


@pytest.mark.parametrize("name", ["sum", "max"])
def test_denormal_floats_are_not_zeros(node, stream_route, name, cupy):
    """CuPy compiles kernels of its own so that they are."""
    fields = [np.arange(1, 70, dtype="u4").view("f4") * (1 + rank) for rank in range(node.size)]
    x = cupy.asarray(fields[node.rank])
    with Allreduce(node.comm, x, name, node=node) as total:
        total.reduce(x)
        assert (x.get().view("u4") == folded(name, fields).view("u4")).all()


@pytest.mark.parametrize("count", [1, 7, 1024, 4096, 4097, 65_537, 300_001])
def test_sizes_by_every_route(node, stream_route, count, cupy):
    fields = [np.random.default_rng(rank).standard_normal(count) for rank in range(node.size)]
    right = functools.reduce(np.add, fields)
    whole = cupy.zeros(count + 1)
    with Allreduce(node.comm, whole[:count], node=node) as total:
        for begin in (0, 1):  # of 16 bytes, and between
            x = whole[begin : begin + count]
            for _ in range(3):
                x[...] = cupy.asarray(fields[node.rank])
                total.reduce(x)
                assert np.array_equal(x.get(), right)


def test_messages_are_not_for_ranks_of_one_node(node, monkeypatch, cupy):
    """Where halos are made to go by MPI, reductions go through memory of the host."""
    monkeypatch.setenv("MPISHARE_ROUTE", "mpi")
    x = cupy.full(1000, node.rank + 1.0)
    with Allreduce(node.comm, x, node=node) as total:
        total.reduce(x)
        assert {*x.tolist()} == {sum(range(1, node.size + 1))}


def check_counted(node, count, dtype, most):
    """Sums of whole numbers, again and again."""
    numbers = node.xp.arange(count) % most
    x = node.xp.zeros(count, dtype)
    with Allreduce(node.comm, x, node=node) as total:
        for step in range(4):
            x[...] = (numbers + node.rank + step).astype(dtype)
            total.reduce(x)
            ranks = sum(range(node.size)) + node.size * step
            assert bool((x == node.size * numbers + ranks).all())


@pytest.mark.parametrize("count", [50_000, 1 << 20])
def test_larger_fields_to_everybody(node, monkeypatch, count):
    """As far as `SMALL_NBYTES` goes: a thread has several elements."""
    from mpishare.reduction.cuda import spinning

    monkeypatch.setattr(spinning, "SMALL_NBYTES", 16 << 20)
    check_counted(node, count, "i1", 5)


def test_a_field_of_several_segments(node, monkeypatch):
    from mpishare.reduction.cuda import spinning

    monkeypatch.setattr(spinning, "SEGMENT_NBYTES", 100_000)
    check_counted(node, 70_001, "f8", 1 << 20)


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_strides_may_differ_from_rank_to_rank(node, stream_route, count, cupy):
    shape = 3, count // 3
    fields = [np.random.default_rng(rank).standard_normal(shape) for rank in range(node.size)]
    forms = [
        cupy.zeros(shape),
        cupy.zeros(shape, order="F"),
        cupy.full((5, 2 * shape[1]), 77.0)[1:4, ::2],
    ]
    x = forms[node.rank % len(forms)]
    with Allreduce(node.comm, x, node=node) as total:
        for _ in range(3):
            x[...] = cupy.asarray(fields[node.rank])
            total.reduce(x)
            assert np.array_equal(x.get(), functools.reduce(np.add, fields))
    if node.rank % len(forms) == 2:
        assert int((x.base == 77).sum()) == x.base.size - x.size


@pytest.mark.parametrize("code", "eilfdFD")
def test_dots_are_those_of_numpy(node, stream_route, code, cupy):
    dtype = np.dtype(code)
    rng = np.random.default_rng(7)
    for count in (0, 1, 31, 5000, *([] if code == "e" else [200_003])):
        pairs = []
        for _ in range(node.size):
            pair = rng.integers(-3, 3, (2, count)).astype(dtype)
            pairs.append(pair * dtype.type(1 + 1j) if dtype.kind == "c" else pair)
        # Small whole numbers: no sum is rounded, but in halves.
        right = sum(np.vdot(x.astype(complex), y.astype(complex)) for x, y in pairs)
        x, y = (cupy.asarray(each) for each in pairs[node.rank])
        with Allreduce(node.comm, Layout(3, dtype), node=node) as total:
            for _ in range(3):
                found = total.dot(x, y)
                assert (found.shape, found.dtype) == ((), dtype)
                assert complex(found.get()) == pytest.approx(right, rel=3e-3 if code == "e" else 0)


def test_dots_of_views_and_of_other_shapes_on_each_rank(node, stream_route, cupy):
    shape = 4 + node.rank, 5, 70
    u, v = cupy.zeros([n + 2 for n in shape]), cupy.zeros(shape, order="F")
    x = u[1:-1, 1:-1, 1:-1]
    x[...] = cupy.arange(x.size).reshape(shape) % 11
    v[...] = cupy.arange(x.size).reshape(shape) % 7
    out = cupy.full((1, 1), 5.0)
    right = node.comm.allreduce(float((x * v).sum()))
    with Allreduce(node.comm, u[0, 0], node=node) as total:
        for a, b in ((x, v), (v, x), (v, v), (x, x), (x, v)):
            for _ in range(3):
                assert total.dot(a, b, out=out) is out
                expected = right if a is not b else node.comm.allreduce(float((a * b).sum()))
                assert float(out[0, 0]) == expected


def test_dots_of_arrays_that_may_only_be_read(node, cupy):
    """Such as those that XLA hands to a callback."""

    def read_only(array):
        interface = {**array.__cuda_array_interface__, "data": (array.data.ptr, True)}
        return SimpleNamespace(__cuda_array_interface__=interface)

    x, out = cupy.arange(5.0), cupy.zeros(())
    stream = cupy.cuda.get_current_stream()
    with Allreduce(node.comm, x, node=node) as total:
        for _ in range(3):
            total.dot(read_only(x), read_only(x), out=out, stream=stream)
            assert float(out) == 30 * node.size
        for call in (
            lambda: total.reduce(read_only(x)),
            lambda: total.dot(x, x, out=read_only(out)),
        ):
            with pytest.raises(ValueError, match="is read-only"):
                call()


def test_the_same_bits_in_every_run(node, stream, cupy):
    """And on every rank: all compare with the first result, ten thousand times, with delays."""
    rng = np.random.default_rng(node.rank)
    x, y = (cupy.asarray(rng.standard_normal(20_001)) for _ in range(2))
    counted, out = CountedField(node, SMALL), cupy.zeros(())
    pairs = [pair for pair in node.report().pairs if pair.origin != pair.target]
    by_turns = any(pair.route != "fused" for pair in pairs)
    steps = 300 if by_turns else 10_000
    with Allreduce(node.comm, counted.array, node=node) as total:
        right = float(total.dot(x, y))
        assert {*node.comm.allgather(right)} == {right}
        for _ in range(steps):
            counted.put()
            if rng.random() < 0.02:
                counted.idle(50)
            total.reduce(counted.array)
            counted.count()
            total.dot(x, y, out=out)
            counted.check_sum(out, right)
            counted.go_on()
        node.synchronize()
        assert counted.is_right_after(steps)


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_steps_without_the_host(node, kernel_route, stream, count):
    field = CountedField(node, count)
    rng = np.random.default_rng(node.rank)
    with Allreduce(node.comm, field.array, node=node) as total:
        field.reduce_by(total)
        node.synchronize()
        with Latch() as latch:  # no call waits for the GPU
            latch.hold(stream.ptr)
            for _ in range(50):
                field.reduce_by(total)
            assert not stream.done
            node.barrier()
            latch.release()
        for _ in range(300):
            field.put()
            if rng.random() < 0.1:
                field.idle(100)
            total.reduce(field.array)
            field.count()
            if rng.random() < 0.1:
                field.idle(100)
            field.go_on()
        node.synchronize()
        assert field.is_right_after(351)


def test_plans_on_streams_of_their_own(node, cupy):
    """Two reductions and a halo, each on a stream, with nothing between them."""
    fields = [CountedField(node, count) for count in (SMALL, LARGE, 3 * LARGE)]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in fields]
    plans = [Allreduce(node.comm, field.array, node=node) for field in fields]
    u, side = cupy.zeros(40_000), cupy.cuda.Stream(non_blocking=True)
    halo = mpishare.HaloExchange(node.comm, u, 10, dims=(node.size,), periods=True, node=node)
    for _ in range(200):
        for field, stream, total in zip(fields, streams, plans, strict=True):
            with stream:
                field.reduce_by(total)
        with side:
            halo.exchange(u)
    for stream in (*streams, side):
        node.synchronize(stream)
    assert all(field.is_right_after(200) for field in fields)
    for plan in (*plans, halo):
        plan.close()


@TWO
@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_a_held_rank_is_waited_for(node, kernel_route, count, cupy):
    field = cupy.zeros(count)

    def reduce():
        if node.rank:
            field.fill(0)
        total.reduce(field)

    with Allreduce(node.comm, field, node=node) as total:
        reduce()
        node.synchronize()
        for value in (7, 8, 9):
            signal = functools.partial(total.reduce, field)
            check_order(node, field, 0, signal=signal, wait=reduce, value=value)


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_replays_and_calls_mixed(node, kernel_route, stream, count, cupy):
    field, out = CountedField(node, count), cupy.zeros(())
    x = cupy.arange(1000.0)
    right = node.size * float(cupy.dot(x, x))
    with Allreduce(node.comm, field.array, node=node) as total:
        stream.begin_capture()
        for _ in range(3):
            field.put()
            total.reduce(field.array)
            field.count()
            total.dot(x, x, out=out)
            field.check_sum(out, right)
            field.go_on()
        graph = stream.end_capture()
        for _ in range(50):
            graph.launch(stream)
            field.reduce_by(total)
        node.synchronize()
        assert field.is_right_after(200)


@TWO
def test_no_capture_where_the_host_makes_sums(node, monkeypatch, stream, cupy):
    """As it does for ranks that take turns of a GPU; all of it is refused with nothing done."""
    monkeypatch.setenv("MPISHARE_ROUTE", "copy")
    x, out = cupy.ones(3), cupy.zeros(())
    with Allreduce(node.comm, x, node=node) as total:
        for call in (lambda: total.reduce(x), lambda: total.dot(x, x, out=out)):
            with captured(stream), pytest.raises(UnsupportedError, match="Multi-Process Service"):
                call()
        total.reduce(x)
        assert x.get().tolist() == [node.size] * 3


def test_host_memory_and_what_is_no_stream_are_refused_with_nothing_done(node, cupy):
    x = cupy.ones(6)
    with Allreduce(node.comm, x, node=node) as total:
        with pytest.raises(TypeError, match="GPU memory"):
            total.dot(x, np.ones(6))
        with pytest.raises(TypeError, match="stream"):
            total.reduce(x, stream="0")
        total.reduce(x)
        assert x.get().tolist() == [node.size] * 6

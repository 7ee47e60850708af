"""Halos on GPUs: routes, streams, graphs, tensors. What every backend does is in `*_ranks.py`.

Most of these never let the host look between the steps: kernels write what depends on the step,
other kernels count what is wrong, and the host reads the count at the end.
"""

import time

import numpy as np
import pytest

import mpishare
from mpishare import UnsupportedError
from mpishare.plans.gpu.flags import _BEGUN
from tests.helpers.captures import buffers_of, captured, skip_without_graphs
from tests.helpers.counted import Counted
from tests.helpers.halos import (
    Kind,
    accumulated,
    check,
    even_case,
    exchange_by,
    exchange_step,
    exchanging,
    make_fields,
    plan,
    put,
    staging_buffers,
    weights,
)
from tests.helpers.latch import Latch, within
from tests.helpers.rings import ring
from tests.helpers.rows import fill, wrong

TWO = pytest.mark.ranks(min=2)
SOURCE = r"""
extern "C" {
__global__ void put(long long* u, const long long* numbers, const bool* owned, long long n,
                    const long long* step) {
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n;
       i += (long long)gridDim.x * blockDim.x)
    if (owned[i]) u[i] = numbers[i] * 1000003LL + *step;
}
__global__ void count(const long long* u, const long long* numbers, long long n,
                      const long long* step, unsigned long long* errors) {
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n;
       i += (long long)gridDim.x * blockDim.x) {
    long long right = numbers[i] < 0 ? -77LL : numbers[i] * 1000003LL + *step;
    if (u[i] != right) atomicAdd(errors, 1ULL);
  }
}
__global__ void spoil(long long* u, const bool* owned, long long n) {
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n;
       i += (long long)gridDim.x * blockDim.x)
    if (owned[i]) u[i] = -999;
}
}
"""


class CountedField(Counted):
    """A field of 64-bit numbers, with kernels that write it, spoil it, and count what is wrong."""

    def __init__(self, case, rank):
        import cupy

        super().__init__(SOURCE, "put", "count", "spoil")
        cells = case.cells[rank]
        owned = np.zeros(cells.shape, bool)
        owned[case.owned(rank)] = True
        self.numbers, self.owned = cupy.asarray(cells), cupy.asarray(owned)
        self.array = cupy.full(cells.shape, -77, "i8")
        self._n = np.int64(cells.size)
        self.put()
        self.spoil()
        self.count()
        self.array.fill(-77)
        self.forget()

    def put(self):
        grid = (64,), (128,)
        self._put(*grid, (self.array, self.numbers, self.owned, self._n, self.step))

    def count(self):
        grid = (64,), (128,)
        self._count(*grid, (self.array, self.numbers, self._n, self.step, self.errors))

    def spoil(self):
        self._spoil((64,), (128,), (self.array, self.owned, self._n))


def case_of(node, corners=True, cells=5):
    return even_case((node.size, 1), True, cells, ((1, 2), (2, 1)), corners=corners)


def test_routes_are_what_the_probe_saw(node):
    """`fused`, unless a GPU is shared without MPS; a rank copies its own cells."""
    seen = {(pair.origin, pair.target): pair.route for pair in node.report().pairs}
    with exchanging(node, case_of(node)) as (halo, _):
        for rank, found in halo.routes.items():
            assert found == ("copy" if rank == node.rank else seen[node.rank, rank])


@pytest.mark.parametrize("name", ["copy", "pinned", "mpi", "mpi-host"])
def test_forced_routes(node, monkeypatch, name):
    """Messages go out of GPU memory where the MPI takes that, unless told otherwise."""
    monkeypatch.setenv("MPISHARE_ROUTE", name)
    with exchanging(node, case_of(node)) as (halo, fields):
        right = {"mpi-host": "mpi"}.get(name, name)
        if name == "mpi" and node.report().gpu_messages == "":
            right = "mpi-gpu"
        assert {found for rank, found in halo.routes.items() if rank != node.rank} <= {right}
        exchange_step(halo, fields, 1)


def test_numpy_fields_on_a_gpu_node(node):
    """Backends follow the fields."""
    case = case_of(node)
    field = np.zeros(case.cells[node.rank].shape)
    with plan(node.comm, case, field, node=node) as halo:
        assert set(halo.routes.values()) <= {"host"}
        field[case.owned(node.rank)] = case.cells[node.rank][case.owned(node.rank)]
        halo.exchange(field)
    assert np.array_equal(field, case.cells[node.rank])


@pytest.mark.parametrize("way", ["exchange", "start and wait"])
def test_steps_without_the_host(node, every_route, stream, way):
    """Owned cells are spoiled right after the wait; GPUs idle at random places."""
    case = case_of(node)
    field = CountedField(case, node.rank)
    rng = np.random.default_rng(node.rank)
    with plan(node.comm, case, field.array, node=node) as halo:
        for _ in range(300 if every_route != "mpi" else 60):
            field.put()
            if rng.random() < 0.1:
                field.idle(100)
            exchange_by(halo, field.array, halves=way != "exchange")
            field.count()
            if rng.random() < 0.1:
                field.idle(100)
            field.spoil()
            field.go_on()
        node.synchronize()
        assert field.is_right_after(300 if every_route != "mpi" else 60)


@TWO
@pytest.mark.parametrize("width", [((1, 0),), ((0, 2),)], ids=["up", "down"])
def test_a_rank_that_may_run_ahead(node, stream_route, stream, width):
    """And no call waits for the GPU: the first ones are made while the stream is held."""
    case = even_case((node.size,), False, 4, width)
    field = CountedField(case, node.rank)
    slow = node.size - 1 if width == ((1, 0),) else 0

    def steps(count):
        for _ in range(count):
            field.put()
            halo.exchange(field.array)
            if node.rank == slow:
                field.idle(30)
            field.count()
            field.spoil()
            field.go_on()

    with plan(node.comm, case, field.array, node=node) as halo:
        steps(1)
        node.synchronize()
        with Latch() as latch:
            latch.hold(stream.ptr)
            steps(30)
            assert not stream.done
            node.barrier()
            latch.release()
        steps(169)
        node.synchronize()
        assert field.is_right_after(200)


@pytest.mark.parametrize("way", ["current", "given", "address"])
def test_streams_in_turn(node, every_route, way):
    """The calls of a plan come one after the other, whatever stream they are on."""
    import cupy

    case = case_of(node)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    field = CountedField(case, node.rank)
    fence = cupy.cuda.Event()
    with plan(node.comm, case, field.array, node=node) as halo:

        def call(function, *fields, on):
            if way == "current":
                with on:
                    function(*fields)
            else:
                function(*fields, stream=on if way == "given" else on.ptr)

        for step in range(60):
            before, after = streams[step % 3], streams[(step // 2) % 3]
            with before:
                field.put()
            call(halo.start, field.array, on=before)
            fence.record(before)
            after.wait_event(fence)
            call(halo.wait, on=after)
            with after:
                field.count()
                field.go_on()
            for each in streams:
                fence.record(after)
                each.wait_event(fence)
        for each in streams:
            node.synchronize(each)
        assert field.is_right_after(60)


@TWO
def test_start_does_not_hold_the_stream(node, stream_route, stream):
    """Between start and wait my own work goes on, though a neighbor is held."""
    case = even_case((node.size,), True, 6, 1)
    [field] = fields = make_fields(node, case, [Kind("i8")])
    with plan(node.comm, case, field.array, node=node) as halo:
        put(fields, 1)
        halo.exchange(field.array)
        put(fields, 2)
        inside = field.array[halo.interior].copy()
        field.array[halo.interior] = inside
        node.synchronize()
        node.barrier()
        with Latch() as latch:
            if node.rank == 0:
                latch.hold(stream.ptr)
            halo.start(field.array)
            field.array[halo.interior] = inside
            went_on = within(5, lambda: stream.done) if node.rank else not stream.done
            node.barrier()
            latch.release()
            halo.wait()
            node.synchronize()
        assert all(node.comm.allgather(went_on))
        check(fields, 2)


@TWO
@pytest.mark.parametrize("buffers", [2, 1])
def test_packed_cells_stay_until_they_are_unpacked(node, forced_route, stream, buffers):
    """Rank 1 has signaled, and its stream is held: the others have packed the next call by then.

    The control has one buffer, and must lose cells.
    """
    xp, field = node.xp, node.xp.zeros((4, 16))
    with staging_buffers(buffers), ring(node, field, axes=0) as halo:
        flags = buffers_of(halo).flags
        begun = flags._index(flags.rank, _BEGUN)
        exchange_by(halo, field, halves=True)
        first = field.copy()  # once before: CUDA may wait for all streams to load a kernel
        node.synchronize()
        fill(xp, field, node.rank, 1)
        halo.start(field)
        with Latch() as latch:
            if node.rank == 1:
                latch.hold(stream.ptr)
            halo.wait()
            first = field.copy()
            if node.rank != 1:
                fill(xp, field, node.rank, 2)
                halo.start(field)
                # The pack takes less than the way to rank 1 and to its stream.
                assert within(5, lambda: flags._view[begun] == 3)
            node.barrier()
        if node.rank == 1:
            fill(xp, field, node.rank, 2)
            halo.start(field)
        halo.wait()
        node.synchronize()
        assert wrong(field, node.rank, node.size, 2) == 0
        lost = sum(node.comm.allgather(wrong(first, node.rank, node.size, 1)))
    assert bool(lost) == (buffers == 1), lost


@pytest.mark.parametrize("way", ["exchange", "start and wait"])
def test_replays_mixed_with_calls(node, stream_route, stream, way):
    """A thousand replays of two graphs, each with arrays of its own, and calls between them."""
    case = case_of(node)
    pair = [CountedField(case, node.rank) for _ in range(2)]
    rng = np.random.default_rng(node.rank)

    def step(halo, field):
        field.put()
        exchange_by(halo, field.array, halves=way != "exchange")
        field.count()
        field.spoil()
        field.go_on()

    with plan(node.comm, case, pair[0].array, node=node) as halo:
        skip_without_graphs(halo)
        step(halo, pair[0])
        graphs, counts = [], [1, 0]
        for field in pair:
            with captured(stream, graphs):
                for _ in range(3):  # several exchanges in one graph
                    step(halo, field)
        for at, which in enumerate(np.random.default_rng(5).integers(0, 2, 1000).tolist()):
            graphs[which].launch(stream)
            counts[which] += 3
            if at % 37 == 0:
                step(halo, pair[which])
                counts[which] += 1
            if rng.random() < 0.01:
                time.sleep(0.002)
        node.synchronize()
        assert all(field.is_right_after(n) for field, n in zip(pair, counts, strict=True))
        graphs.clear()


def test_accumulate_in_a_graph(node, stream_route, stream):
    """The same numbers, added up again and again."""
    xp, case, kind = node.xp, case_of(node), Kind("f8")
    given, right = (xp.asarray(of(case, kind, node.rank, 1)) for of in (weights, accumulated))
    u, differs, wrong = xp.zeros_like(given), xp.zeros(given.shape, bool), xp.zeros(given.shape)
    with plan(node.comm, case, u, node=node) as halo:
        skip_without_graphs(halo)

        def step():
            u[...] = given
            halo.accumulate(u)
            xp.not_equal(u, right, out=differs)
            xp.add(wrong, differs, out=wrong)

        step()
        node.synchronize()
        graphs = []
        with captured(stream, graphs):
            step()
        for _ in range(200):
            graphs[0].launch(stream)
        node.synchronize()
        assert not wrong.any()
        graphs.clear()


def test_the_first_accumulate_is_not_captured(node, stream):
    """It would allocate; the capture goes on, and the plan too."""
    case = case_of(node)
    with exchanging(node, case, [Kind("f8")]) as (halo, [field]):
        skip_without_graphs(halo)
        graphs = []
        with captured(stream, graphs), pytest.raises(UnsupportedError, match="first call"):
            halo.accumulate(field.array)
        graphs.clear()
        field.array.fill(1)
        halo.accumulate(field.array)
        node.synchronize()


def test_an_exchange_and_its_reverse_are_one_chain(node, stream_route):
    """On two streams, the first of which is slow."""
    import cupy

    first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    case = case_of(node)
    slow = CountedField(case, node.rank)
    with exchanging(node, case, [Kind("f8")]) as (halo, [field]):
        found = []
        for streams in ((first, first), (first, second)):
            field.array.fill(0)
            field.array[halo.owned] = 1
            node.synchronize()
            node.barrier()
            with streams[0]:
                slow.idle(20_000)
                halo.exchange(field.array)
            with streams[1]:
                halo.accumulate(field.array)
            node.synchronize(first)
            node.synchronize(second)
            found.append(field.array.get())
    assert found[0].max() > 1
    assert (found[0] == found[1]).all()


def test_arrays_that_were_seen_before(node):
    """Ids come again, and a shape may be set: neither is taken for an array that was seen."""
    xp, held = node.xp, []
    layout = mpishare.Layout((4, 6))
    with ring(node, layout, axes=0) as halo:
        for step in range(100):  # more than are known at a time
            field = xp.full((4, 6), 100.0 * step + node.rank)
            for _ in range(3):  # plainly, as a graph, replayed
                halo.exchange(field)
            for ghosts, shift in ((0, -1), (3, 1)):
                expected = 100 * step + (node.rank + shift) % node.size
                assert bool((field[ghosts] == expected).all()), (step, ghosts)
            if step % 3:
                held.append(field)
        field.shape = (8, 3)
        with pytest.raises(ValueError, match="shape"):
            halo.exchange(field)
        field.shape = (4, 6)
        halo.exchange(field)


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def test_tensors_and_arrays_together_need_a_stream(node, torch, stream):
    case = even_case((node.size,), True, 4)
    array, tensor = node.xp.zeros(6), torch.zeros(6, dtype=torch.float64, device="cuda")
    torch.cuda.synchronize()
    with plan(node.comm, case, [array, tensor], node=node) as halo:
        with pytest.raises(ValueError, match="stream="):
            halo.exchange(array, tensor)
        array[1:5] = node.rank
        halo.exchange(array, tensor, stream=stream)
        node.synchronize(stream)
        assert float(array[0]) == (node.rank - 1) % node.size

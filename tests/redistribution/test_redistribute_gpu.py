"""Redistributions on GPUs: streams, captured steps, tensors, and routes that are forced."""

import numpy as np
import pytest

import mpishare
from mpishare import Redistribute
from tests.helpers.captures import refuse_full_checks, skip_unless_fused, skip_without_graphs
from tests.helpers.distributions import check_case
from tests.helpers.latch import Latch, within

TWO = pytest.mark.ranks(min=2)
N = 24


def parts(node, step, *, of=np.float64):
    """This rank's rows and columns of a matrix that differs from step to step."""
    whole = (np.arange(N * N).reshape(N, N) + 1000 * step).astype(of)
    mine = np.array_split(np.arange(N), node.size)[node.rank]
    return whole[mine], whole[:, mine]


@pytest.mark.parametrize("seed", range(8))
def test_random_distributions_by_forced_routes(node, forced_route, seed):
    check_case(node, node.comm, seed).close()


def test_it_is_ordered_on_the_stream_of_the_call(node, cupy):
    """Held work before it holds it, too; the host goes on."""
    stream = cupy.cuda.Stream(non_blocking=True)
    a = node.xp.zeros((len(parts(node, 0)[0]), N))
    a.fill(-1)  # loads the kernel, which would wait for the stream that is held
    with Redistribute(node.comm, (N, N), 0, 1, node=node) as plan:
        skip_without_graphs(plan)
        for _ in range(3):
            plan.forward(a, stream=stream)
        node.synchronize()
        for step in range(3):
            rows, columns = parts(node, step)
            fresh = node.xp.asarray(rows)
            node.synchronize()
            with Latch() as latch:
                latch.hold(stream.ptr)
                with stream:
                    a[...] = fresh
                b = plan.forward(a, stream=stream)
                with stream:
                    a.fill(-1)  # what is sent was read before
                assert not stream.done
            assert within(20, lambda: stream.done)
            assert (b.get() == columns).all()
            node.barrier()


def test_the_first_way_back_is_not_captured(node):
    a = node.xp.zeros(parts(node, 0)[0].shape)
    with Redistribute(node.comm, (N, N), 0, 1, node=node) as plan:
        skip_without_graphs(plan)
        b = plan.forward(a)
        stream = node.xp.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            try:
                with pytest.raises(mpishare.UnsupportedError, match="before the capture"):
                    plan.backward(b)
            finally:
                stream.end_capture()


TRANSPOSES = {
    "two axes": ((701, 900), 0, 1, (1, 0)),
    "the first is fastest": ((65, 130, 97), 0, 1, (1, 2, 0)),
    "the middle is fastest": ((33, 70, 129), 0, 2, (2, 0, 1)),
    "one after the other": ((64, 64, 64), 0, 1, (0, 2, 1)),
    "a short axis": ((4, 300, 301), 1, 2, (1, 2, 0)),
    "four axes": ((12, 30, 41, 60), 1, 2, (3, 0, 2, 1)),
    "uneven boxes": ((90, 110, 75), "uneven", 2, (2, 1, 0)),
}


def uneven(node, shape):
    """Slabs along the first axis, of which the last rank has most."""
    cuts = [shape[0] * rank // (3 * node.size) for rank in range(node.size)] + [shape[0]]
    lower, upper = cuts[node.rank : node.rank + 2]
    return mpishare.Box((lower, 0, 0), (upper, *shape[1:]))


@pytest.mark.parametrize("dtype", ["i1", "i2", "f4", "f8", "c16"])
@pytest.mark.parametrize("name", TRANSPOSES)
def test_transposed_parts_of_any_size(node, name, dtype):
    require_transposed(node, name, dtype)


@pytest.mark.parametrize("name", TRANSPOSES)
def test_transposed_parts_by_forced_routes(node, forced_route, name):
    require_transposed(node, name, "f8")


def require_transposed(node, name, dtype):
    """A permuted redistribution there and back, three times, is what NumPy makes of it."""
    shape, source, target, permute = TRANSPOSES[name]
    source = uneven(node, shape) if source == "uneven" else source
    dtype, rng = np.dtype(dtype), np.random.default_rng(7)
    with Redistribute(node.comm, shape, source, target, dtype, permute=permute, node=node) as plan:
        for _ in range(3):
            whole = np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype)
            whole = whole.reshape(shape)
            a = np.ascontiguousarray(whole[plan.source_box.slices])
            b = plan.forward(node.xp.asarray(a))
            right = whole[plan.target_box.slices].transpose(permute)
            assert b.get().tobytes() == right.tobytes()
            assert plan.backward(b).get().tobytes() == a.tobytes()


@pytest.mark.parametrize("route", ["", "pinned"], ids=["own", "pinned"])
def test_a_captured_transpose_brings_what_is_new(node, monkeypatch, route):
    """Parts that go by tiles, beside other work, and in a graph."""
    monkeypatch.setenv("MPISHARE_ROUTE", route)
    shape, permute = (64, 64, 64), (1, 2, 0)
    with Redistribute(node.comm, shape, 0, 1, permute=permute, node=node) as plan:
        skip_without_graphs(plan)
        a, b = node.xp.zeros(plan.source_shape), node.xp.zeros(plan.target_shape)
        back = node.xp.zeros_like(a)
        plan.backward(plan.forward(a))

        def there_and_back(a, b, back):
            plan.start(a, b)
            plan.wait()
            plan.backward(b, out=back)

        step = mpishare.capture(node, there_and_back)
        for number in range(20):
            whole = np.random.default_rng(number).random(shape)
            a.set(whole[plan.source_box.slices])
            step(a, b, back)
            assert (b.get() == whole[plan.target_box.slices].transpose(permute)).all(), number
            assert (back.get() == whole[plan.source_box.slices]).all(), number


@TWO
@pytest.mark.parametrize("rows", [N, 1])
def test_a_rank_without_elements_is_as_fast(node, rows):
    """All but one of a gather: its arrays are known again, whatever strides an empty one has.

    Of one row all other ranks have nothing at either end.
    """
    with Redistribute(node.comm, (rows, N), 0, mpishare.OnRank(0), node=node) as plan:
        skip_unless_fused(node, plan)
        a, b = node.xp.ones(plan.source_shape), node.xp.zeros(plan.target_shape)
        plan.forward(a, out=b)
        refuse_full_checks(plan)
        for number in range(3):
            a.fill(number)
            plan.forward(a, out=b)
            assert bool((b == number).all())


def test_tensors_are_taken_and_returned(node):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    place = torch.device("cuda", node.device.ordinal)
    with Redistribute(node.comm, (N, N), 0, 1, np.float32, permute=(1, 0), node=node) as plan:
        for step in range(3):
            rows, columns = parts(node, step, of=np.float32)
            b = plan.forward(torch.tensor(rows, device=place))
            assert isinstance(b, torch.Tensor)
            assert (b.cpu().numpy() == columns.T).all()
            back = plan.backward(b, out=torch.empty(rows.shape, device=place))
            assert (back.cpu().numpy() == rows).all()


def test_arrays_in_host_memory_are_refused(node):
    rows, _ = parts(node, 0)
    with (
        Redistribute(node.comm, (N, N), 0, 1, node=node) as plan,
        pytest.raises(TypeError, match="forward failed: the array is not an array in GPU memory"),
    ):
        plan.forward(rows)

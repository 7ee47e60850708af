"""PyTorch: tensors as fields, and gradients through exchanges by the function of the example."""

import numpy as np
import pytest

import mpishare
from tests.helpers.autograd import functions
from tests.helpers.compiled import WHY_NONE
from tests.helpers.halos import even_case, plan, random_case
from tests.helpers.rings import beside, ring

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pad = torch.nn.functional.pad


Exchange, ExchangeInPlace, gradients_in_one_array = functions(torch)
pytestmark = pytest.mark.ranks(max=2)  # conftest.py says why
FORMS = pytest.mark.parametrize("form", [Exchange, ExchangeInPlace], ids=["copied", "in_place"])


@pytest.fixture(autouse=True)
def in_one_thread():
    """On a GPU the backward pass would have a thread of its own."""
    torch.set_num_threads(1)  # ranks share the cores
    with torch.autograd.set_multithreading_enabled(False):
        yield


@pytest.fixture(params=["node", "host_node"])
def any_node(request):
    """Where there are GPUs too, tensors in host memory go by a node of the host."""
    return request.getfixturevalue(request.param)


def place_of(node):
    return f"cuda:{node.device.ordinal}" if node.backend == "cuda" else "cpu"


def on(node, array):
    """A tensor of doubles where the node computes."""
    return torch.tensor(array, dtype=torch.float64, device=place_of(node))


def dot(node, x, y):
    return node.comm.allreduce(float((x.detach() * y.detach()).sum()))


def test_gradients_and_adjoint_of_random_plans(node):
    """<E x, y> = <x, E' y> over all ranks, and the adjoint of the adjoint is the exchange."""
    for seed in range(4 if node.backend == "cuda" else 12):
        case = random_case(np.random.default_rng([seed, node.size, 31]), node.size)
        rng = np.random.default_rng([seed, node.rank])
        x, y = (on(node, rng.normal(size=case.cells[node.rank].shape)) for _ in range(2))
        with plan(node.comm, case, x, node=node) as halo:
            x.requires_grad_()
            y.requires_grad_()
            filled = Exchange.apply(x, halo)
            (found,) = torch.autograd.grad(filled, x, y, create_graph=True)
            assert dot(node, filled, y) == pytest.approx(dot(node, x, found), rel=1e-12), seed
            (again,) = torch.autograd.grad(found, y, x.detach())
            assert torch.equal(again, filled), seed


def laplacian(u):
    return u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:] - 4 * u[1:-1, 1:-1]


def diffuse(u, rate, surround):
    for _ in range(5):
        u = u + rate * laplacian(surround(u)) - 0.1 * u**2
    return u


@FORMS
def test_loss_and_gradients_are_those_of_the_whole(node, form):
    """Through five exchanges, by what was there at first and by a rate that all ranks share."""
    case = even_case((node.size, 1), True, cells=5)
    whole = on(node, np.random.default_rng(7).normal(size=(5 * node.size, 5))).requires_grad_()
    rate = on(node, 0.2).requires_grad_()

    def wrapped(u):
        return pad(u[None, None], (1, 1, 1, 1), mode="circular")[0, 0]

    loss = diffuse(whole, rate, wrapped).square().sum()
    loss.backward()
    rows = slice(5 * node.rank, 5 * node.rank + 5)
    mine = whole.detach()[rows].clone().requires_grad_()
    my_rate = rate.detach().clone().requires_grad_()
    fields = mpishare.Layout((7, 7))
    total = mpishare.Allreduce(node.comm, mpishare.Layout(()), node=node)
    with plan(node.comm, case, fields, node=node) as halo:
        my_loss = diffuse(mine, my_rate, lambda u: form.apply(pad(u, (1, 1, 1, 1)), halo))
        my_loss = my_loss.square().sum()
        my_loss.backward()
    total.reduce(my_rate.grad)
    summed = my_loss.detach()
    total.reduce(summed)
    torch.testing.assert_close(summed, loss.detach(), rtol=1e-13, atol=0)
    torch.testing.assert_close(mine.grad, whole.grad[rows], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(my_rate.grad, rate.grad, rtol=1e-12, atol=0)


def test_gradients_in_any_order_of_memory(node):
    """They come as views: all strides zero from a sum, columns first from a transpose."""
    case = even_case((node.size, 1), True, cells=3)
    x = on(node, np.zeros((5, 5))).requires_grad_()
    with plan(node.comm, case, x.detach(), node=node) as halo:
        (of_sum,) = torch.autograd.grad(Exchange.apply(x, halo).sum(), x)
        (turned,) = torch.autograd.grad(Exchange.apply(x, halo).T.contiguous().sum(), x)
        given = Exchange.apply(x.T, halo)
        assert given.is_contiguous()
    right = on(node, np.zeros((5, 5)))
    right[1:-1, 1:-1] = 1
    right[[1, -2], 1:-1] += 1  # shadowed by a ghost of a neighbor, and of this rank itself
    right[1:-1, [1, -2]] += 1
    right[[[0], [-1]], [[0, -1]]] = 1  # corners travel nowhere
    assert torch.equal(of_sum, right)
    assert torch.equal(turned, right)


@pytest.mark.parametrize("call", ["exchange", "accumulate", "start"])
def test_a_field_that_requires_a_gradient(node, call):
    case = even_case((node.size, 1), True, cells=2)
    x = on(node, np.ones((4, 4)))
    with plan(node.comm, case, x, node=node) as halo:
        wrong = x.clone().requires_grad_()
        with pytest.raises(ValueError, match=rf"{call} failed: .* requires a gradient"):
            getattr(halo, call)(wrong)
        with pytest.raises(ValueError, match=r"HaloExchange failed: .* requires a gradient"):
            ring(node, wrong, dims=case.dims)
        halo.exchange(x.clone().requires_grad_().detach())


def test_tensors_are_shared(node):
    """A window of a tensor, seen as a tensor: the same memory on all ranks."""
    source = on(node, np.arange(6.0).reshape(2, 3))
    with node.share(source if node.is_leader else None) as window:
        table = torch.from_dlpack(window.array)
        assert torch.equal(table, source)
        node.barrier()
        if node.is_leader:
            table[0] = 7
        window.fence(stream=stream_of(node))
        assert table.sum() == 3 * 7 + 12
        window.fence(stream=stream_of(node))
        del table
    with node.share_each(source + node.rank) as window:
        for rank in range(node.size):
            assert torch.equal(torch.from_dlpack(window.segment(rank)), source + rank), rank
        part = torch.from_dlpack(window.array)[1:]
        with node.share_each(part, copy=False) as rows:
            right = (node.rank + 1) % node.size
            node.barrier()
            torch.from_dlpack(rows.segment(right))[0, 0] = -right
            rows.fence(stream=stream_of(node))
            assert part[0, 0] == -node.rank
            rows.fence(stream=stream_of(node))
        del part


def stream_of(node):
    return torch.cuda.current_stream() if node.backend == "cuda" else None


DTYPES = ("float16", "float32", "float64", "complex64", "uint8", "int16", "bool", "bfloat16")


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes_of_torch(any_node, name):
    node, dtype, odd = any_node, getattr(torch, name), any_node.rank % 2
    field = torch.zeros(6, dtype=dtype, device=place_of(node))
    with plan(node.comm, even_case((node.size,), True, 4), field, node=node) as halo:
        assert node.backend == "cuda" or set(halo.routes.values()) <= {"host"}
        field[1:5] = torch.tensor([odd, 1, 0, 1 - odd], dtype=dtype)
        halo.exchange(field)
        left, right = beside(node)
        assert field[[0, 5]].tolist() == [1 - left % 2, right % 2]


def test_sums_of_bfloat16(any_node):
    """NumPy knows the numbers by ml_dtypes alone."""
    pytest.importorskip("ml_dtypes")
    node = any_node
    field = torch.full((5,), 1.5, dtype=torch.bfloat16, device=place_of(node))
    with plan(node.comm, even_case((node.size,), True, cells=3), field, node=node) as halo:
        halo.accumulate(field)
    assert field.tolist() == [0, 3, 1.5, 3, 0]
    with mpishare.Allreduce(node.comm, field, node=node) as total:
        total.reduce(field)
        assert field.tolist() == [0, 3 * node.size, 1.5 * node.size, 3 * node.size, 0]
        one = torch.ones_like(field)
        assert float(total.dot(one, one)) == 5 * node.size


def test_tensors_are_redistributed(host_node, monkeypatch):
    """Each becomes an array of NumPy once a call: that takes longer than to move a small one."""
    shape, seen = (3, 2 * host_node.size + 1), []
    numpy = torch.Tensor.numpy
    monkeypatch.setattr(torch.Tensor, "numpy", lambda self: seen.append(self) or numpy(self))
    whole = torch.arange(3.0 * shape[1]).reshape(shape)
    with mpishare.Redistribute(host_node.comm, shape, 1, 0, "f4", node=host_node) as plan:
        a, b = whole[plan.source_box.slices], whole[plan.target_box.slices]
        for given, out, times in (
            (a.clone(), torch.empty(b.shape), 2),
            (a.clone(), None, 2),
            (a, torch.empty(b.T.shape).T, 4),  # with gaps and in another order: looked at twice
        ):
            seen.clear()
            found = plan.forward(given, out=out)
            assert isinstance(found, torch.Tensor)
            assert out is None or found is out
            assert torch.equal(found, b)
            assert len(seen) == (4 if WHY_NONE else times)  # the route in NumPy looks twice
        plan.start(b.clone(), torch.empty(a.shape), backward=True)
        assert torch.equal(plan.wait(), a)
        with pytest.raises(ValueError, match="forward failed: the array requires a gradient"):
            plan.forward(a.clone().requires_grad_())

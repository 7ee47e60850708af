"""PyTorch's backward pass on GPUs: in the thread of the node, and on the stream of the forward."""

import re

import pytest

import mpishare
from tests.helpers.halos import even_case, plan
from tests.helpers.latch import Latch, within

torch = pytest.importorskip("torch")


class Exchange(torch.autograd.Function):
    """As in scripts/examples/21_torch_training.py, in a few words."""

    @staticmethod
    def forward(ctx, field, halo, seen):
        ctx.halo, ctx.seen = halo, seen
        seen.append(torch.cuda.current_stream().cuda_stream)
        result = field.clone()
        halo.exchange(result)
        return result

    @staticmethod
    def backward(ctx, gradient):
        ctx.seen.append(torch.cuda.current_stream().cuda_stream)
        result = gradient.clone(memory_format=torch.contiguous_format)
        ctx.halo.accumulate(result)
        return result, None, None


@pytest.fixture
def place(node):
    assert node.backend == "cuda"
    return torch.device("cuda", node.device.ordinal)


def test_the_backward_pass_stays_on_its_stream(node, place):
    """A held stream holds the gradient too, and neither pass waits on the host."""
    case = even_case((node.size,), True, cells=4)
    stream, seen = torch.cuda.Stream(place), []
    field = torch.ones(6, dtype=torch.float64, device=place)
    with plan(node.comm, case, field, node=node) as halo:

        def slope(given):
            loss = (3 * Exchange.apply(given, halo, seen)).sum()
            return torch.autograd.grad(loss, given)[0]

        with torch.autograd.set_multithreading_enabled(False), torch.cuda.stream(stream):
            given = field.clone().requires_grad_()
            for _ in range(3):  # kernels are loaded, and graphs are made
                slope(given)
            stream.synchronize()
            node.barrier()
            seen.clear()
            with Latch() as latch:
                latch.hold(stream.cuda_stream)
                found = slope(given)
                node.barrier()
                assert not within(0.03, stream.query)
                latch.release()
            node.synchronize(stream)
        right = torch.tensor([0.0, 6, 3, 3, 6, 0], dtype=torch.float64, device=place)
        assert torch.equal(found, right)
        assert seen == [stream.cuda_stream] * 2


def test_a_backward_pass_in_a_thread_of_its_own_is_refused(node, place):
    """The error names the way out, which works on the same graph."""
    case = even_case((node.size,), True, cells=4)
    given = torch.ones(6, dtype=torch.float64, device=place, requires_grad=True)
    with plan(node.comm, case, given.detach(), node=node) as halo:
        loss = Exchange.apply(given, halo, []).sum()
        words = re.escape("torch.autograd.set_multithreading_enabled(False)")
        with pytest.raises(mpishare.UnsupportedError, match=words):
            loss.backward(retain_graph=True)
        with torch.autograd.set_multithreading_enabled(False):
            loss.backward()
        node.synchronize(torch.cuda.current_stream(place))
        assert given.grad.sum() == 6

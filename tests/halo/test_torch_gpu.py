"""PyTorch's backward pass on GPUs: in the thread of the node, and on the stream of the forward."""

import re

import pytest

import mpishare
from tests.helpers.autograd import functions
from tests.helpers.captures import refuse_full_checks, skip_unless_fused
from tests.helpers.halos import even_case, plan
from tests.helpers.latch import Latch, within

torch = pytest.importorskip("torch")


Exchange, _, _ = functions(torch)


class Recorded:
    """A plan that notes on which of PyTorch's streams it is called."""

    def __init__(self, halo):
        self.halo, self.streams = halo, []

    def _call(self, name, field):
        self.streams.append(torch.cuda.current_stream().cuda_stream)
        getattr(self.halo, name)(field)

    def exchange(self, field):
        self._call("exchange", field)

    def accumulate(self, field):
        self._call("accumulate", field)


@pytest.fixture
def place(node):
    return torch.device("cuda", node.device.ordinal)


def test_the_backward_pass_stays_on_its_stream(node, place):
    """A held stream holds the gradient too, and neither pass waits on the host."""
    case = even_case((node.size,), True, cells=4)
    stream = torch.cuda.Stream(place)
    field = torch.ones(6, dtype=torch.float64, device=place)
    with plan(node.comm, case, field, node=node) as halo:
        calls = Recorded(halo)

        def slope(given):
            loss = (3 * Exchange.apply(given, calls)).sum()
            return torch.autograd.grad(loss, given)[0]

        with torch.autograd.set_multithreading_enabled(False), torch.cuda.stream(stream):
            given = field.clone().requires_grad_()
            for _ in range(3):  # kernels are loaded, and graphs are made
                slope(given)
            stream.synchronize()
            node.barrier()
            calls.streams.clear()
            with Latch() as latch:
                latch.hold(stream.cuda_stream)
                found = slope(given)
                node.barrier()
                assert not within(0.03, stream.query)
                latch.release()
            node.synchronize(stream)
        right = torch.tensor([0.0, 6, 3, 3, 6, 0], dtype=torch.float64, device=place)
        assert torch.equal(found, right)
        assert calls.streams == [stream.cuda_stream] * 2


def test_a_backward_pass_in_a_thread_of_its_own_is_refused(node, place):
    """The error names the way out, which works on the same graph."""
    case = even_case((node.size,), True, cells=4)
    given = torch.ones(6, dtype=torch.float64, device=place, requires_grad=True)
    with plan(node.comm, case, given.detach(), node=node) as halo:
        loss = Exchange.apply(given, halo).sum()
        words = re.escape("torch.autograd.set_multithreading_enabled(False)")
        with pytest.raises(mpishare.UnsupportedError, match=words):
            loss.backward(retain_graph=True)
        with torch.autograd.set_multithreading_enabled(False):
            loss.backward()
        node.synchronize(torch.cuda.current_stream(place))
        assert given.grad.sum() == 6


def test_tensors_are_replayed(node, place):
    """By the memory that they have at the call, on PyTorch's default stream."""

    case = even_case((node.size,), True, cells=4)
    field = torch.zeros(6, dtype=torch.float64, device=place)
    other = torch.zeros_like(field)
    with plan(node.comm, case, field, node=node) as halo:
        skip_unless_fused(node, halo)
        halo.exchange(field)
        refuse_full_checks(halo)
        for step in range(6):
            if step == 3:
                field.set_(other)
            field[1:-1] = 10.0 * step + node.rank
            halo.exchange(field)
            ends = [10 * step + (node.rank + side) % node.size for side in (-1, 1)]
            assert field[[0, -1]].tolist() == ends
        with pytest.raises(ValueError, match="requires a gradient"):
            halo.exchange(field.requires_grad_())


def test_a_conjugate_view_is_refused(node, place):
    """Its memory has other values than it."""
    case = even_case((node.size,), True, cells=4)
    field = torch.zeros(6, dtype=torch.complex128, device=place)
    view = "conjugate or negative view"
    with plan(node.comm, case, field, node=node) as halo, pytest.raises(ValueError, match=view):
        halo.exchange(field.conj())

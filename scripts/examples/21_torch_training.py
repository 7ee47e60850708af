"""Train a convolution network on a field cut into blocks: PyTorch's gradients cross the exchanges.

    mpirun -n 4 python -m mpi4py scripts/examples/21_torch_training.py

The loss must be that of the whole field, on which every rank trains too, by PyTorch alone.
"""

import torch
from mpi4py import MPI
from torch.nn.functional import conv2d, pad

import mpishare

N = 12  # cells per rank along each axis
CELLS = N * N * MPI.COMM_WORLD.size


class Exchange(torch.autograd.Function):
    """The field with its ghosts filled; the adjoint adds each ghost to the cell that it shadows."""

    @staticmethod
    def forward(ctx, field, halo, is_reverse=False):
        ctx.halo, ctx.is_reverse = halo, is_reverse
        result = field.clone(memory_format=torch.contiguous_format)
        (halo.accumulate if is_reverse else halo.exchange)(result)
        return result

    @staticmethod
    def backward(ctx, *grad_outputs):
        return Exchange.apply(*grad_outputs, ctx.halo, not ctx.is_reverse), None, None


def train(u, wanted, padded, add_up=lambda _: None):
    w, losses = (torch.arange(72).cos() / 4).to(u).requires_grad_(), []  # two layers of 3 x 3
    for _ in range(40):
        hidden = conv2d(padded(u, 0), w[:36].view(4, 1, 3, 3)).tanh()
        found = conv2d(padded(hidden, 1), w[36:].view(1, 4, 3, 3))
        losses.append((found - wanted).square().sum() / CELLS)
        (slope,) = torch.autograd.grad(losses[-1], w)
        add_up(slope)
        w = (w - 0.4 * slope).detach().requires_grad_()
    return torch.stack(losses).detach().cpu()


with mpishare.Node() as node, torch.autograd.set_multithreading_enabled(False):  # in one thread
    torch.set_default_device(f"cuda:{node.device.ordinal}" if node.device else "cpu")
    cart = node.comm.Create_cart(MPI.Compute_dims(node.size, 2), periods=[True, True])
    u = torch.arange(CELLS).cos().double().view(1, 1, *(N * n for n in cart.dims))
    wanted = u.roll((1, 1), (2, 3)) - u
    here = (..., *[slice(N * c, N * c + N) for c in cart.coords])
    like = [mpishare.Layout((1, channels, N + 2, N + 2)) for channels in (1, 4)]
    halos = [mpishare.HaloExchange(cart, f, 1, axes=(2, 3), corners=True, node=node) for f in like]
    total = mpishare.Allreduce(cart, mpishare.Layout(72), node=node)
    filled = lambda v, layer: Exchange.apply(pad(v, (1,) * 4), halos[layer])  # noqa: E731
    losses = torch.stack(cart.allgather(train(u[here], wanted[here], filled, total.reduce))).sum(0)
    whole = train(u, wanted, lambda v, _: pad(v, (1,) * 4, "circular"))
    if (error := (losses / whole - 1).abs().max()) > 1e-9 or losses[-1] > losses[0] / 3:
        raise SystemExit(f"WRONG: losses differ by {error}")
    if node.is_leader:
        print(f"{cart.dims} ranks, losses differ by {error:.0e}: right")

"""Layers of DistDL by messages and by mpishare, in turns: their bits, and their times.

PYTHONPATH=../lib:../../docs/ports mpirun -n 2 python -m mpi4py distdl_times.py [ROUNDS]

With Microsoft's fork of DistDL by the fork's own back end alone, as DISTDL_BACKEND_COMM and
DISTDL_BACKEND_ARRAY name it: mpi and numpy, mpi and cupy, or nccl and cupy.
"""

import itertools

import in_turns
import torch
from distdl import backends
from distdl.nn import AllSumReduce, DistributedFeatureConv2d, HaloExchange, Repartition
from distdl.utilities.slicing import compute_subshape
from in_turns import comm, node, on_gpu, print_head
from mpi4py import MPI

if is_fork := hasattr(backends, "common"):
    from distdl.backends.common.partition import MPIPartition

    WAYS = (backends.backend.__name__,)
else:
    import mpishare_distdl
    from distdl.backends.mpi.partition import MPIPartition

    WAYS = "messages", "mpishare"
IMAGES = (1, 8, 64, 64), (8, 32, 128, 128), (8, 32, 256, 256)
MATRICES = (64, 64), (512, 512), (2048, 2048)
BATCHES = (64, 16, 64, 64), (64, 64, 64, 64)
SUMS = 1, 10_000, 1_000_000
GRID = sorted(MPI.Compute_dims(comm.size, 2))


def use(way):
    """Let layers go by messages, or by mpishare."""
    if not is_fork:
        mpishare_distdl.use(node() if way == "mpishare" else None)


def partition(*parts):
    """Return the partition of all ranks."""
    return MPIPartition(comm).create_cartesian_topology_partition(parts)


def halo(shape, width=1):
    """Return a layer that exchanges halos of images cut along both axes, and its input."""
    cut = partition(1, 1, *GRID)
    ghosts = torch.zeros(4, 2, dtype=int).numpy()
    for axis in 2, 3:
        at, last = cut.index[axis], cut.shape[axis] - 1
        ghosts[axis] = [width * (at > 0), width * (at < last)]
    own = compute_subshape(cut.shape, cut.index, shape)
    return HaloExchange(cut, ghosts, ghosts, ghosts), random(own + ghosts.sum(1))


def repartition(shape):
    """Return a layer that cuts a later axis in place of the first, and its input."""
    before, after = [1] * len(shape), [1] * len(shape)
    before[0] = after[max(1, len(shape) - 2)] = comm.size
    cut = partition(*before)
    own = compute_subshape(cut.shape, cut.index, shape)
    return Repartition(cut, partition(*after)), random(own)


def all_sum(count):
    """Return a layer that sums over all ranks, and its input."""
    return AllSumReduce(partition(comm.size), (0,)), random([count])


def random(shape):
    """Return a tensor that is another one on each rank."""
    generator = torch.Generator().manual_seed(comm.rank)
    shape = [int(extent) for extent in shape]
    return torch.randn(shape, generator=generator).to(device)


def compare(what, make, *given):
    """Compare a layer and its adjoint."""

    def forward():
        layer, x = make(*given)
        return without_gradients(*make(*given)), [layer(x)]

    def adjoint():
        layer, x = make(*given)
        y = layer(x.requires_grad_().clone())
        call = lambda: torch.autograd.grad(y, x, dy, retain_graph=True)  # noqa: E731
        dy = random(y.shape)
        return call, torch.autograd.grad(y, x, dy.clone(), retain_graph=True)

    in_turns.compare(what, WAYS, forward, use=use)
    in_turns.compare(f"{what}, adjoint", WAYS, adjoint, use=use)


def without_gradients(layer, x):
    """Return a call of a layer that keeps nothing for its adjoint; halos are filled in place.

    A layer of its own: DistDL's make anew all they have when inputs no longer need gradients.
    """

    def call():
        with torch.no_grad():
            layer(x)

    return call


def step(shape):
    """Return a training step of three convolutions, and its weights after three."""
    torch.manual_seed(0)
    cut = partition(1, 1, *GRID)
    x = random(compute_subshape(cut.shape, cut.index, shape))
    channels = shape[1], 32, 32, 1
    layers = [
        DistributedFeatureConv2d(cut, *pair, kernel_size=3, padding=1)
        for pair in itertools.pairwise(channels)
    ]
    net = torch.nn.Sequential(*layers).to(device)
    weights = list(net.parameters())  # rank 0 has them all
    learn = torch.optim.SGD(weights, 1e-3) if weights else None

    def call():
        net.zero_grad()
        net(x).square().mean().backward()
        if learn:
            learn.step()

    for _ in range(3):
        call()
    return call, [each.detach().clone() for each in weights]


def named(shape):
    """Return the extents of a shape."""
    return " x ".join(map(str, shape))


device = torch.device(f"cuda:{node().device.ordinal}" if on_gpu() else "cpu")
print_head("DistDL", WAYS, "torch")
for shape in IMAGES:
    compare(f"halo of {named(shape)}", halo, shape)
for shape in MATRICES + BATCHES:
    compare(f"repartition of {named(shape)}", repartition, shape)
for count in SUMS:
    compare(f"sum of {count}", all_sum, count)
for shape in IMAGES[:2]:
    in_turns.compare(f"training step, {named(shape)}", WAYS, step, shape, use=use)

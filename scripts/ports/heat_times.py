"""Heat's communication by messages and by mpishare, in turns: bits and times.

PYTHONPATH=../lib:../../docs/ports mpirun -n 2 python -m mpi4py heat_times.py [ROUNDS]
"""

import heat as ht
import in_turns
import mpishare_heat
import torch
from in_turns import comm, node, on_gpu
from mpi4py import MPI

WAYS = "messages", "mpishare"
SQUARES = 64, 512, 2048
COUNTS = 1, 50_000, 1_000_000


def use(way):
    """Let Heat's calls go by messages, or by mpishare, with plans at the first call."""
    mpishare_heat.use(node() if way == "mpishare" else None, after=0)


def compare(what, call):
    """Print a line for a call, which returns tensors."""
    in_turns.compare(what, WAYS, lambda: (call, call()), use=use)


def compare_resplits(shape, source, targets):
    """Compare what cuts an array along another axis."""
    x = ht.random.rand(*shape, split=source)
    for target in targets:
        name = f"`resplit` {' x '.join(map(str, shape))}, axis {source} to {target}"
        compare(name, lambda target=target: [ht.resplit(x, target).larray])


def compare_halos(shape, split, width):
    """Compare the exchange of halos beside an array."""
    x = ht.random.rand(*shape, split=split)

    def call():
        x.get_halo(width)
        return [halo for halo in (x.halo_prev, x.halo_next) if halo is not None]

    compare(f"`get_halo({width})`, {' x '.join(map(str, shape))}, axis {split}", call)


def compare_calls(count):
    """Compare a sum, a broadcast and a gather of some numbers of each rank."""
    given = torch.rand(count, generator=torch.Generator().manual_seed(comm.rank)).to(device)
    summed, all_of = (torch.empty(n, device=device) for n in (count, count * comm.size))
    counts, starts = [count] * comm.size, [count * rank for rank in range(comm.size)]

    def allreduce():
        ht.MPI_WORLD.Allreduce(given, summed, MPI.SUM)
        return [summed]

    def bcast():
        ht.MPI_WORLD.Bcast(given, root=0)
        return [given]

    def allgatherv():
        ht.MPI_WORLD.Allgatherv(given, (all_of, counts, starts))
        return [all_of]

    for call in allreduce, bcast, allgatherv:
        compare(f"`{call.__name__.capitalize()}`, {count} float32", call)


def compare_steps():
    """Compare computations, of which calls are a part."""
    points, series = ht.random.rand(20_000, 8, split=0), ht.random.rand(200_000, split=0)
    left, right = ht.random.rand(256, 256, split=0), ht.random.rand(256, 256, split=1)
    kernel = ht.ones(101)
    compare("`mean` and `var` of 20000 x 8", lambda: [points.mean(0).larray, points.var(0).larray])
    compare("`convolve`, 200000 by 101", lambda: [ht.convolve(series, kernel, "same").larray])
    compare("`matmul` 256^2, axes 0 and 1", lambda: [ht.matmul(left, right).larray])

    def cluster():
        means = ht.cluster.KMeans(8, init="random", max_iter=10, tol=-1.0, random_state=1)
        return [means.fit(points).cluster_centers_.larray]

    compare("`KMeans` of 20000 x 8, 10 steps", cluster)


if on_gpu():
    ht.use_device("gpu")
device = ht.get_device().torch_device
ht.random.seed(1)
in_turns.print_head("Heat", WAYS, "heat", "torch")
for extent in SQUARES:
    compare_resplits((extent, extent), 0, (1, None))
    compare_resplits((extent, extent), 1, (0, None))
compare_resplits((25, 50, 50, 20), 0, (None, 2, 3))
compare_halos((1_000_000,), 0, 1)
compare_halos((1_000_000,), 0, 5000)
for split in 0, 1:
    compare_halos((1024, 1024), split, 1)
for count in COUNTS:
    compare_calls(count)
compare_steps()

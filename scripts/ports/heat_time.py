"""Time Heat's calls by messages and by mpishare, in turns.

    mpirun -n 2 python -m mpi4py heat_time.py [--rounds 15] [--check] [--times] [--memory gpu]

First all calls must give the same bits both ways. Then they take turns in one process; a time is
that of the slowest rank, and of a round the mean of its calls. Before each line both ways must give
the same numbers, up to the order of sums. ``--check`` ends before the times, ``--times`` begins
with them, and ``--only`` times the lines whose names match a pattern. With ``--memory gpu`` the
tensors are on the GPUs; by messages they go through the host, as Heat does without an MPI that
takes them.
"""

import argparse
import re

import heat as ht
import mpishare_heat
import numpy as np
import torch
from mpi4py import MPI
from turns import report, times

import mpishare

COMM = MPI.COMM_WORLD
SQUARES = 64, 512, 2048
COUNTS = 1, 50_000, 1_000_000


def place():
    """Return where the tensors of Heat's arrays are."""
    return ht.get_device().torch_device


def filled(shape, split, dtype=torch.float32):
    """Return an array that is the same at each call."""
    whole = torch.arange(np.prod(shape), device=place()).reshape(shape) % 251
    return ht.array(whole.to(dtype), split=split)


def halo(array, width):
    """Return both halos of an array."""
    array.get_halo(width)
    return [each for each in (array.halo_prev, array.halo_next) if each is not None]


def own(comm, tensor, call):
    """Return a tensor after a call that changes it, which is given the communicator, too."""
    call(comm, tensor)
    return tensor


def gathered(comm, part, axis):
    """Return the parts of all ranks along an axis, which are alike."""
    shape = list(part.shape)
    shape[axis] *= comm.size
    counts = [part.shape[axis]] * comm.size
    starts = [rank * counts[0] for rank in range(comm.size)]
    whole = torch.empty(shape, dtype=part.dtype, device=part.device)
    comm.Allgatherv(part, (whole, counts, starts), recv_axis=axis)
    return whole


def cases():
    """Yield what each line of the table times, as a function that returns its result.

    A second function is what is compared before, where what is timed leaves all numbers alike.
    """
    comm = ht.MPI_WORLD
    for n in SQUARES:
        for split, target in ((0, 1), (1, 0), (0, None), (1, None)):
            array = filled((n, n), split)
            name = f"`resplit` {n}^2, axis {split} to {target}"
            yield name, lambda a=array, t=target: ht.resplit(a, t).larray
    block = filled((25, 50, 50, 20), 0)  # that of its benchmark has 344 times as many
    for target in None, 2, 3:
        name = f"`resplit` 25 x 50 x 50 x 20, axis 0 to {target}"
        yield name, lambda t=target: ht.resplit(block, t).larray
    for shape, split, width in (
        ((1_000_000,), 0, 1),
        ((1_000_000,), 0, 5000),
        ((1024, 1024), 0, 1),
        ((1024, 1024), 1, 1),
    ):
        array = filled(shape, split)
        name = f"`get_halo({width})`, {' x '.join(map(str, shape))}, axis {split}"
        yield name, lambda a=array, w=width: halo(a, w)
    for n in COUNTS:
        zeros = torch.zeros(n, device=place())  # their sums are zeros again
        own_numbers = (torch.arange(n, device=place()) % 251 + comm.rank).float()
        for call, move in (
            ("Allreduce", lambda c, x: c.Allreduce(MPI.IN_PLACE, x, MPI.SUM)),
            ("Bcast", lambda c, x: c.Bcast(x, root=0)),
        ):
            yield (
                f"`{call}`, {n} float32",
                lambda x=zeros, m=move: own(comm, x, m),
                lambda x=own_numbers, m=move: own(comm, x.clone(), m),
            )
        yield f"`Allgatherv`, {n} float32", lambda x=zeros: gathered(comm, x, 0)
    part = torch.ones(512, 256, device=place())
    yield "`Allgatherv` 512 x 256, axis 1", lambda: gathered(comm, part, 1)
    table = filled((20_000, 8), 0, torch.float64)
    yield (
        "`mean` and `var` of 20 000 x 8",
        lambda: [each.larray for each in (ht.mean(table, 0), ht.var(table, 0))],
    )
    signal, kernel = filled((200_000,), 0), filled((101,), None)
    yield "`convolve`, 200 000 by 101", lambda: ht.convolve(signal, kernel, mode="same").larray
    square = filled((256, 256), 0)
    yield "`matmul` 256^2, axes 0 and 1", lambda: ht.matmul(square, filled((256, 256), 1)).larray

    def clusters():
        ht.random.seed(1)
        return ht.cluster.KMeans(n_clusters=4, max_iter=10).fit(table).cluster_centers_.larray

    yield "`KMeans` of 20 000 x 8, 10 steps", clusters


def bits(found):
    """Return the bytes of tensors."""
    each = found if isinstance(found, list) else [found]
    return [tensor.contiguous().cpu().numpy().tobytes() for tensor in each]


def compare(node, dtype):
    """Abort unless all calls give the same bits both ways."""
    for name, call in cases_of(dtype):
        mpishare_heat.use(None)
        before = bits(call())
        mpishare_heat.use(node, after=0)
        for _ in range(3):
            assert bits(call()) == before, (name, dtype)


def compare_numbers(node, name, call):
    """Abort unless a call gives the same numbers both ways; sums may have another order."""
    mpishare_heat.use(None)
    before = call()
    mpishare_heat.use(node, after=0)
    for _ in range(2):
        torch.testing.assert_close(call(), before, msg=lambda why: f"{name}: {why}")


def cases_of(dtype):
    """Yield resplits, halos, gathers and broadcasts of uneven arrays."""
    shape, comm = (7, 5, 6), ht.MPI_WORLD
    for split in range(3):
        array = filled(shape, split, dtype)
        for target in (*range(3), None):
            yield f"{split} to {target}", lambda a=array, t=target: ht.resplit(a, t).larray
            yield (
                f"{split} to {target}_",
                lambda s=split, t=target: (
                    own(None, filled(shape, s, dtype), lambda _, x: x.resplit_(t)).larray
                ),
            )
        yield f"halo of {split}", lambda a=array: halo(a, 1)
    for root in range(comm.size):
        tensor = torch.full((7, 3), comm.rank, device=place()).to(dtype)
        yield (
            f"from {root}",
            lambda x=tensor, r=root: own(comm, x.clone(), lambda c, x: c.Bcast(x, root=r)),
        )
    part = torch.full((3, 2), comm.rank, device=place()).to(dtype)
    yield "gathered", lambda: gathered(comm, part, 0)
    yield "gathered along axis 1", lambda: gathered(comm, part, 1)
    operations = [MPI.SUM, MPI.PROD, MPI.MAX, MPI.MIN, MPI.LAND, MPI.LOR, MPI.LXOR]
    if dtype != torch.bool:  # MPI has no bitwise operations on them
        operations += [MPI.BAND, MPI.BOR, MPI.BXOR]
    for op in operations:
        if dtype in mpishare_heat.OPERATIONS[op.handle][1]:
            yield (
                f"reduced by {op}",
                lambda op=op: own(
                    comm, part.clone(), lambda c, x: c.Allreduce(MPI.IN_PLACE, x, op)
                ),
            )


def main():
    """Compare, then time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--times", action="store_true")
    parser.add_argument("--only", default="", help="a regular expression")
    parser.add_argument("--memory", choices=("host", "gpu"), default="host")
    options = parser.parse_args()
    torch.set_num_threads(1)  # ranks share the cores
    device = synchronize = None
    if options.memory == "gpu":
        ht.use_device("gpu")  # of this rank
        device, synchronize = ht.get_device().device_id, torch.cuda.synchronize
        torch.cuda.set_device(device)
    backend = "cuda" if options.memory == "gpu" else "host"
    with mpishare.Node(backend=backend, device=device) as node:
        if not options.times:
            bounds = mpishare_heat.LEAST_SUM, mpishare_heat.LEAST_BCAST
            mpishare_heat.LEAST_SUM = mpishare_heat.LEAST_BCAST = 0
            for dtype in sorted(mpishare_heat.MOVED, key=str):
                compare(node, dtype)
            mpishare_heat.LEAST_SUM, mpishare_heat.LEAST_BCAST = bounds
            if COMM.rank == 0:
                print(f"{COMM.size} ranks: the same bits", flush=True)
        if not options.check:
            if COMM.rank == 0:
                print("| | before, us | after, us | ratio (quartiles) |\n|---|---|---|---|")
            ways = {"before": None, "after": node}
            for name, call, *compared in cases():
                if not re.search(options.only, name):
                    continue
                compare_numbers(node, name, *(compared or [call]))
                forms = dict.fromkeys(ways, call)
                prepare = lambda way: mpishare_heat.use(ways[way])  # noqa: E731
                report(name, times(forms, options.rounds, prepare, synchronize))
        mpishare_heat.use(None)


if __name__ == "__main__":
    main()

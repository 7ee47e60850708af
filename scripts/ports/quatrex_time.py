"""Time QuaTrEx's collectives and its transposition by messages and by mpishare, in turns.

    mpirun -n 2 python -m mpi4py quatrex_time.py [--rounds 15] [--check] [--beside host_mpi nccl]

First all of them must give the same bits both ways. Then they take turns in one process; a time is
that of the slowest rank, and of a round the mean of its calls. ``--check`` ends before the times.
QTX_ARRAY_MODULE is QuaTrEx's own variable: with cupy the arrays are on GPUs. Let each rank see only
its own GPU then, by CUDA_VISIBLE_DEVICES. mpishare is timed beside each of the named back ends.
"""

import argparse

import mpishare_quatrex
import numpy as np
from mpi4py import MPI
from qttools import sparse, xp
from qttools.comm import comm
from qttools.datastructures import DSDBCOO
from qttools.utils.gpu_utils import synchronize_device
from scipy.sparse import random as random_matrix
from turns import report, times

import mpishare

COMM = MPI.COMM_WORLD
# complex128 in each part; there is one per rank
COUNTS = (1_000, 100_000, 1_000_000) if COMM.size <= 8 else (1_000, 10_000, 100_000)
STACKS = ((16,), 500), ((64,), 2000), ((32, 4), 2000)  # energies, k points; rows of the matrix
ON_GPU = xp.__name__ == "cupy"


def collectives(count, dtype):
    """Yield each collective of parts of so many elements, as a function of the back end."""
    size, rank = COMM.size, COMM.rank
    parts = (xp.arange(size * count) % 251 + rank).astype(dtype).reshape(size, count)
    part = parts.reshape(-1)[:count]

    def all_to_all(backend):
        received = xp.empty_like(parts)
        comm.stack.all_to_all(parts, received, backend=backend)
        return received

    def all_gather(backend):
        received = xp.empty_like(parts)
        comm.stack.all_gather(part, received, backend=backend)
        return received

    def all_reduce(backend):
        received = xp.empty_like(part)
        comm.stack.all_reduce(part, received, backend=backend)
        return received

    def bcast(backend):
        received = part if rank == size - 1 else xp.empty_like(part)
        comm.stack.bcast(received, root=size - 1, backend=backend)
        return received

    yield from (all_to_all, all_gather, all_reduce, bcast)


def matrix(stack, rows):
    """Return a distributed matrix of 20 nonzeros per row, with other values on each rank."""
    rng = np.random.default_rng(1)
    pattern = random_matrix(rows, rows, density=20 / rows, format="coo", random_state=rng)
    blocks = np.full(10, rows // 10)  # also on GPUs
    given = sparse.coo_matrix(pattern.astype(complex))
    found = DSDBCOO.from_sparray(given, blocks, stack)
    found.data[...] = xp.asarray(rng.random(found.data.shape)) + COMM.rank
    return found


def transposed(given, backend):
    """Return a matrix after its transposition there and back, and the data in between."""
    comm.stack._config["all_to_all"] = backend
    given.dtranspose()
    between = given._data
    given.dtranspose()
    return between, given._data


def check(backends):
    """Stop all ranks unless all ways give the same bits, also for uneven parts."""
    for dtype in "f4", "f8", "c16", "i8":
        for count in 1, 7, 1000:
            for call in collectives(count, dtype):
                found = [call(backend).tobytes() for backend in backends]
                assert len(set(found)) == 1, (call.__name__, dtype, count)
    for energies, *others in (7,), (5, 2), (9, 2, 3):
        stack = energies + max(0, COMM.size - 5), *others  # QuaTrEx wants one per rank
        given = matrix(stack, 50)
        first, *rest = (transposed(given, backend) for backend in backends * 2)
        for found in rest:
            assert [each.tobytes() for each in found] == [each.tobytes() for each in first], stack


def main():
    """Compare, then time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--check", action="store_true")
    beside = ["host_mpi"] if ON_GPU else ["device_mpi"]
    parser.add_argument("--beside", nargs="+", default=beside, help="back ends of QuaTrEx")
    options = parser.parse_args()
    with mpishare.Node(backend="cuda" if ON_GPU else "host") as node:
        mpishare_quatrex.use(node)
        config = dict.fromkeys(mpishare_quatrex.COLLECTIVES, "mpishare")
        config["send_recv"] = options.beside[-1]
        comm.configure(1, config, config, override=True)
        check([*options.beside, "mpishare"])
        if COMM.rank == 0:
            print(f"{COMM.size} ranks: the same bits", flush=True)
        if not options.check:
            measure(options.beside, options.rounds)
        mpishare_quatrex.use(None)


def measure(beside, rounds):
    """Print the table."""
    if COMM.rank == 0:
        print("| | before, us | after, us | ratio (quartiles) |\n|---|---|---|---|")

    def lines(what, call):
        backends = *beside, "mpishare"
        forms = {backend: lambda backend=backend: call(backend) for backend in backends}
        found = times(forms, rounds, synchronize=synchronize_device)
        for backend in beside:
            which = f"{what}, {backend}" if beside[1:] else what
            report(which, {"before": found[backend], "after": found["mpishare"]})

    for (least, *others), rows in STACKS:
        stack = max(least, 2 * COMM.size), *others
        given = matrix(stack, rows)
        energies = " x ".join(map(str, stack))
        what = f"`dtranspose`, {energies} of {rows}^2, both ways"
        lines(what, lambda backend, given=given: transposed(given, backend))
    for count in COUNTS:
        for call in collectives(count, "c16"):
            lines(f"`{call.__name__}`, {count} complex128", call)


if __name__ == "__main__":
    main()

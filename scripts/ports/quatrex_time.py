"""Time QuaTrEx's collectives and its transposition by messages and by mpishare, in turns.

    mpirun -n 2 python -m mpi4py quatrex_time.py [--rounds 15] [--check]

First all of them must give the same bits both ways. Then they take turns in one process; a time is
that of the slowest rank, and of a round the mean of its calls. ``--check`` ends before the times.
"""

import argparse

import mpishare_quatrex
import numpy as np
from mpi4py import MPI
from qttools.comm import comm
from qttools.datastructures import DSDBCOO
from scipy import sparse
from turns import report, times

import mpishare

COMM = MPI.COMM_WORLD
COUNTS = 1_000, 100_000, 1_000_000  # complex128 in each part
STACKS = ((16,), 500), ((64,), 2000), ((32, 4), 2000)  # energies, k points; rows of the matrix
BACKENDS = {"before": "device_mpi", "after": "mpishare"}


def collectives(count, dtype):
    """Yield each collective of parts of so many elements, as a function of the back end."""
    size, rank = COMM.size, COMM.rank
    parts = (np.arange(size * count) % 251 + rank).astype(dtype)

    def all_to_all(backend):
        received = np.empty_like(parts)
        comm.stack.all_to_all(parts, received, backend=backend)
        return received

    def all_gather(backend):
        received = np.empty_like(parts)
        comm.stack.all_gather(parts[:count], received, backend=backend)
        return received

    def all_reduce(backend):
        received = np.empty_like(parts[:count])
        comm.stack.all_reduce(parts[:count], received, backend=backend)
        return received

    def bcast(backend):
        received = parts[:count] if rank == size - 1 else np.empty_like(parts[:count])
        comm.stack.bcast(received, root=size - 1, backend=backend)
        return received

    yield from (all_to_all, all_gather, all_reduce, bcast)


def matrix(stack, rows):
    """Return a distributed matrix of 20 nonzeros per row, with other values on each rank."""
    rng = np.random.default_rng(1)
    pattern = sparse.random(rows, rows, density=20 / rows, format="coo", random_state=rng)
    blocks = np.full(10, rows // 10)
    found = DSDBCOO.from_sparray(pattern.astype(complex), blocks, stack)
    found.data[...] = rng.random(found.data.shape) + COMM.rank
    return found


def transposed(given, backend):
    """Return a matrix after its transposition there and back, and the data in between."""
    comm.stack._config["all_to_all"] = backend
    given.dtranspose()
    between = given._data
    given.dtranspose()
    return between, given._data


def check():
    """Stop all ranks unless both ways give the same bits, also for uneven parts."""
    for dtype in "f4", "f8", "c16", "i8":
        for count in 1, 7, 1000:
            for call in collectives(count, dtype):
                found = [call(backend).tobytes() for backend in BACKENDS.values()]
                assert found[0] == found[1], (call.__name__, dtype, count)
    for stack in (7,), (5, 2), (9, 2, 3):
        given = matrix(stack, 50)
        first, *others = (transposed(given, BACKENDS[name]) for name in ("before", "after") * 2)
        for found in others:
            assert [each.tobytes() for each in found] == [each.tobytes() for each in first], stack


def main():
    """Compare, then time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    with mpishare.Node(backend="host") as node:
        mpishare_quatrex.use(node)
        config = dict.fromkeys(mpishare_quatrex.COLLECTIVES, "mpishare")
        config["send_recv"] = "device_mpi"
        comm.configure(1, config, config, override=True)
        check()
        if COMM.rank == 0:
            print(f"{COMM.size} ranks: the same bits", flush=True)
        if not options.check:
            measure(options.rounds)
        mpishare_quatrex.use(None)


def measure(rounds):
    """Print the table."""
    if COMM.rank == 0:
        print("| | before, us | after, us | ratio (quartiles) |\n|---|---|---|---|")
    for stack, rows in STACKS:
        given = matrix(stack, rows)
        forms = {
            name: lambda backend=backend, given=given: transposed(given, backend)
            for name, backend in BACKENDS.items()
        }
        energies = " x ".join(map(str, stack))
        report(f"`dtranspose`, {energies} of {rows}^2, both ways", times(forms, rounds))
    for count in COUNTS:
        for call in collectives(count, "c16"):
            forms = {
                name: lambda backend=backend, call=call: call(backend)
                for name, backend in BACKENDS.items()
            }
            report(f"`{call.__name__}`, {count} complex128", times(forms, rounds))


if __name__ == "__main__":
    main()

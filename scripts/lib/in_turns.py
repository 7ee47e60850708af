"""Compare two ways to do the same: both in turns in one run, their bits, and a table of times.

Programs of scripts/ports find it by PYTHONPATH, and are called with the number of rounds, 9 by
default, and part of the names of what is wanted. They compute on GPUs where there are any and
MPISHARE_BACKEND does not say "host": a rank on each, or under MPS.
"""

import functools
import os
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from time import perf_counter

import numpy as np
from mpi4py import MPI

ROUND_US = 5e4  # of each way
GIT = "git", "-C", Path(__file__).parent, "describe", "--always", "--dirty"

comm = MPI.COMM_WORLD
rounds = int(sys.argv[1]) if sys.argv[1:2] and sys.argv[1].isdigit() else 9


def nothing(*_):
    """Return at once."""


@functools.cache
def node():
    """Return the node of all ranks."""
    import mpishare

    made = mpishare.Node()
    if made.backend == "cuda":
        import cupy

        cupy.cuda.Device(made.device.ordinal).use()  # PyTorch's, too
    return made


def on_gpu():
    """Return whether the arrays of the node are in GPU memory."""
    return node().backend == "cuda"


def drain():
    """Wait until the GPU has done all."""
    if on_gpu():
        import cupy

        cupy.cuda.runtime.deviceSynchronize()


def slowest_us(call, count=1, drain=drain):
    """Return how long the slowest rank takes for a call that all begin together."""
    drain()
    comm.Barrier()
    begin = perf_counter()
    for _ in range(count):
        call()
    drain()
    return comm.allreduce(1e6 * (perf_counter() - begin), MPI.MAX) / count


def compare(what, ways, make, *given, use=nothing, drain=drain):
    """Print a line of what `make` returns: a call, and arrays or tensors that it brought."""
    if sys.argv[2:] and sys.argv[2] not in what:
        return
    calls, found = {}, []
    for way in ways:
        use(way)
        calls[way], arrays = make(*given)
        found.append([on_host(array) for array in arrays])
    print_line(what, in_turns_us(calls, use, drain), compare_bits(*found))


def in_turns_us(calls, use=nothing, drain=drain, count=None, turns=rounds):
    """Return the times of each round, for each way, after `use` of it.

    A round has `count` calls of each way, by default as many as take ROUND_US.
    """
    times, counts = {way: [] for way in calls}, dict.fromkeys(calls, count)
    for turn in range(turns + 1):  # the first makes plans and compiles, and is not counted
        for way in list(calls) if turn % 2 else reversed(calls):
            use(way)
            if not counts[way]:
                calls[way]()
                counts[way] = max(1, int(ROUND_US / slowest_us(calls[way], 2, drain)))
            lasted = slowest_us(calls[way], counts[way], drain)
            times[way] += [lasted] if turn else []
    return times


def on_host(array):
    """Return a copy in host memory: of a tensor, or of an array of CuPy or NumPy."""
    if hasattr(array, "detach"):
        return array.detach().cpu().numpy().copy()
    return np.array(array) if isinstance(array, np.ndarray) else array.get()


def compare_bits(*found):
    """Say whether the arrays of all ways have the same bits, or how far they are apart."""
    old, new = found[0], found[-1]
    is_same = all(map(np.array_equal, map(bytes_of, old), map(bytes_of, new)))
    if comm.allreduce(is_same, MPI.LAND):
        return "the same"
    unlike = [(a, b) for a, b in zip(old, new, strict=True) if (a != b).any()]
    apart = [abs(a - b).max() / abs(a).max() for a, b in unlike]
    return f"within {comm.allreduce(max(apart, default=0), MPI.MAX):.1g} of the largest"


def bytes_of(array):
    """Return the bytes of an array."""
    return np.ascontiguousarray(array).reshape(-1).view("u1")


def print_head(title, ways, *packages):
    """Begin a table, with the day, the place and the versions."""
    if comm.rank:
        return
    place, made_of = f"{os.cpu_count()} cores", [f"{each} {version(each)}" for each in packages]
    if node.cache_info().currsize and on_gpu():
        import cupy

        place, made_of = f"{place}, GPUs", [*made_of, f"CuPy {cupy.__version__}"]
    revision = os.environ.get("REVISION") or subprocess.check_output(GIT, text=True).strip()
    mpi = " ".join(MPI.Get_library_version().replace("Version:", "").split()[:2])
    print(f"\n{title}: {comm.size} ranks, {place}, µs, medians of {rounds} rounds in turns")
    day = f"{datetime.now(UTC):%Y-%m-%d}"
    print(f"({day}, mpishare {revision}, {', '.join([mpi, *made_of])}).\n")
    print(f"| | {' | '.join(ways)} |{' ratio | bits |' if len(ways) > 1 else ''}")
    print(f"|---|{'---|' * len(ways)}{'---|---|' if len(ways) > 1 else ''}", flush=True)


def print_line(what, times, bits, digits=2):
    """Print the medians of both ways and of the rounds' ratios, with quartiles, and the bits."""
    if comm.rank:
        return
    medians = [np.median(each) for each in times.values()]
    cells = [f"{each:.{0 if each >= 100 else 2}f}" for each in medians]
    if len(times) > 1:
        old, new = map(np.array, times.values())
        quartiles = np.percentile(new / old, (25, 50, 75))
        low, ratio, high = (f"{each:.{digits if each >= 0.1 else 4}f}" for each in quartiles)
        cells += [f"{ratio} ({low} to {high})", bits]
    print(f"| {what} | {' | '.join(cells)} |", flush=True)

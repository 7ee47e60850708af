"""Times of a call before and after a change, in turns, and a line of their table."""

import time

import numpy as np
from mpi4py import MPI

COMM = MPI.COMM_WORLD
WARM = 3  # rounds that are not counted: plans are made, and memory is touched
BLOCK_S = 0.02  # per form and round, in up to a hundred calls


def times(forms, rounds, prepare=None, synchronize=None):
    """Return the times per call of each form by round, in microseconds."""
    found = {name: [] for name in forms}
    calls = dict.fromkeys(forms, 1)  # apart: one form may take a hundred times as long as another
    for at in range(WARM + rounds):
        for name in list(forms) if at % 2 else list(forms)[::-1]:
            if prepare is not None:
                prepare(name)
            COMM.Barrier()
            begin = time.perf_counter()
            for _ in range(calls[name]):
                forms[name]()
            if synchronize is not None:
                synchronize()
            mean = COMM.allreduce((time.perf_counter() - begin) / calls[name], MPI.MAX)
            found[name].append(1e6 * mean)
            if at < WARM:
                calls[name] = max(calls[name], min(100, int(BLOCK_S / mean)))
    return {name: each[WARM:] for name, each in found.items()}


def report(what, found):
    """Print a line: the medians, and the quartiles of the ratio round by round."""
    before, after = (np.median(found[name]) for name in ("before", "after"))
    ratios = np.divide(found["after"], found["before"])
    low, median, high = np.percentile(ratios, (25, 50, 75))
    if COMM.rank == 0:
        print(
            f"| {what} | {before:.0f} | {after:.0f} | {median:.2f} ({low:.2f} to {high:.2f}) |",
            flush=True,
        )

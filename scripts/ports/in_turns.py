"""Compare two ways to do the same: both in turns in one run, their bits, and a line of a table."""

from time import perf_counter

import numpy as np
from mpi4py import MPI

ROUND_US = 5e4  # of each way

comm = MPI.COMM_WORLD


def nothing(*_):
    """Return at once."""


def slowest_us(call, count=1, drain=nothing):
    """Return how long the slowest rank takes for a call that all begin together."""
    drain()
    comm.Barrier()
    begin = perf_counter()
    for _ in range(count):
        call()
    drain()
    return comm.allreduce(1e6 * (perf_counter() - begin), MPI.MAX) / count


def in_turns_us(calls, rounds, drain=nothing, switch=nothing):
    """Return the times of each round, for each way, after `switch` to it."""
    times = {way: [] for way in calls}
    count = 0
    for turn in range(rounds + 1):  # the first makes plans and compiles, and is not counted
        for way in list(calls) if turn % 2 else reversed(calls):
            switch(way)
            if not turn:
                calls[way]()
            count = count or max(1, int(ROUND_US / slowest_us(calls[way], 2, drain)))
            lasted = slowest_us(calls[way], count, drain)
            times[way] += [lasted] if turn else []
    return times


def compare_bits(old, new):
    """Say whether the arrays of both ways have the same bits, or how far they are apart."""
    is_same = all(map(np.array_equal, map(bytes_of, old), map(bytes_of, new)))
    if comm.allreduce(is_same, MPI.LAND):
        return "the same"
    unlike = [(a, b) for a, b in zip(old, new, strict=True) if (a != b).any()]
    apart = [abs(a - b).max() / abs(a).max() for a, b in unlike]
    return f"within {comm.allreduce(max(apart, default=0), MPI.MAX):.1g} of the largest"


def bytes_of(array):
    """Return the bytes of an array."""
    return np.ascontiguousarray(array).reshape(-1).view("u1")


def print_head(title, ways):
    """Begin a table."""
    if comm.rank == 0:
        print(f"\n{title}, {comm.size} ranks, us\n\n| | {' | '.join(ways)} | ratio | bits |")
        print("|---|---|---|---|---|", flush=True)


def print_line(what, times, bits):
    """Print the medians of both ways and of the rounds' ratios, with quartiles, and the bits."""
    old, new = map(np.array, times.values())
    low, ratio, high = np.percentile(new / old, (25, 50, 75))
    if comm.rank == 0:
        both = f"{np.median(old):.0f} | {np.median(new):.0f}"
        print(f"| {what} | {both} | {ratio:.2f} ({low:.2f} to {high:.2f}) | {bits} |", flush=True)

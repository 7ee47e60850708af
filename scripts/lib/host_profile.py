"""Where the time of an exchange on the host backend goes: Python, waiting, copying.

MPISHARE_HOST_CODE=python mpirun -n 8 python scripts/lib/host_profile.py [--help]

Times an exchange as it is, then with a clock around each copy and each wait of the plan, less
what the clock takes itself. What is left of the call is Python. The compiled part makes copies and
waits inside of one call: then only the call is timed. Prints a row per dimensions, face and kind
of fields: microseconds per exchange, means over the ranks.
"""

import argparse
import ctypes
import os
import struct
import time
from collections import Counter, defaultdict
from contextlib import closing
from itertools import product
from statistics import median

import numpy as np
from mpi4py import MPI

import mpishare
from mpishare.halo.host.shared import HostRoute

WIDTH, TURNS = 1, 5
COLUMNS = ("call", "Python", "waiting", "packing", "receiving", "cache misses")
HEAD = "| {:5} | {:4} | {:>9} | {:8} |" + " {:>9} |" * len(COLUMNS)


class Clock:
    """Adds up the time inside of the calls that it wraps, by what they are for."""

    def __init__(self):
        self.reset()
        nothing, count = self.wrap("nothing", int), 20000
        begin = time.perf_counter()
        for _ in range(count):
            nothing()
        self._in_all = (time.perf_counter() - begin) / count
        self._inside = self.seconds["nothing"] / count
        self.reset()

    def reset(self):
        self.seconds, self.calls = defaultdict(float), Counter()

    def wrap(self, what, call):
        """Return the call with the clock around it."""
        now = time.perf_counter

        def with_clock(*arguments):
            begin = now()
            try:
                return call(*arguments)
            finally:
                self.seconds[what] += now() - begin
                self.calls[what] += 1

        return with_clock

    def parts(self, count):
        """Return the seconds of each part per exchange, and those of the clock beside them."""
        inside, calls = self._inside, self.calls
        parts = {what: (took - inside * calls[what]) / count for what, took in self.seconds.items()}
        return parts, self._in_all * calls.total() / count


class CacheMisses:
    """The processor's counter of this process, where it can be read (`perf_event_open`, 2)."""

    def __init__(self):
        attributes = bytearray(128)  # PERF_TYPE_HARDWARE, its size, PERF_COUNT_HW_CACHE_MISSES
        struct.pack_into("IIQ", attributes, 0, 0, len(attributes), 3)
        address = (ctypes.c_char * len(attributes)).from_buffer(attributes)
        call = ctypes.CDLL(None, use_errno=True).syscall
        number = {"x86_64": 298, "aarch64": 241}[os.uname().machine]
        self._fd = call(number, address, 0, -1, -1, 0)
        self.why_not = os.strerror(ctypes.get_errno()) if self._fd < 0 else ""

    def read(self):
        return None if self._fd < 0 else struct.unpack("Q", os.read(self._fd, 8))[0]


class Case:
    """A plan on a grid of ranks, its field, and the exchange."""

    def __init__(self, node, ndims, face_nbytes, kind):
        grid = MPI.Compute_dims(node.size, ndims)
        comm = node.comm.Create_cart(grid, periods=[True] * ndims)
        if ndims == 1:
            shape = (4 + 2 * WIDTH, face_nbytes // 8)
            halo = {"axes": (0,)}
        else:
            side = max(1, round((face_nbytes / 8) ** (1 / (ndims - 1))))
            shape = (side + 2 * WIDTH,) * ndims
            halo = {}
        self.face_nbytes = 8 * (shape[1] if ndims == 1 else (shape[0] - 2 * WIDTH) ** (ndims - 1))
        self._window = node.allocate_each(shape) if kind == "window" else None
        self.field = np.zeros(shape) if self._window is None else self._window.array
        self.field[...] = node.rank
        self._plan = mpishare.HaloExchange(comm, self.field, WIDTH, node=node, **halo)
        self.exchange = self._plan.exchange
        self._comm = comm

    def calls(self):
        """The calls that the plan has bound to this field, with lists of copies."""
        return self._plan._forward._host._calls.values()

    def close(self):
        self._plan.close()
        if self._window is not None:
            self._window.close()
        self._comm.Free()


def put_clocks(case, clock):
    """Put the clock around the copies of a plan."""
    for call in case.calls():
        for copies in call.packs or ():
            copies[:] = [clock.wrap("packing", copy) for copy in copies]
        for copies in (call.self_copies, *call.receives.values()):
            copies[:] = [clock.wrap("receiving", copy) for copy in copies]


def timed(node, case, seconds, clock):
    """Seconds per exchange on this rank, in turns, and how often it was made in all."""
    node.barrier()
    begin = time.perf_counter()
    for _ in range(4):
        case.exchange(case.field)
    each = node.comm.allreduce(time.perf_counter() - begin, MPI.MAX) / 4
    count = min(5000, max(2, int(seconds / TURNS / each)))
    taken = []
    clock.reset()
    for _ in range(TURNS):
        node.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            case.exchange(case.field)
        taken.append((time.perf_counter() - begin) / count)
    return taken, count * TURNS


def profile(node, case, misses, seconds):
    """Seconds per exchange on this rank in all and of each part, and its cache misses."""
    for _ in range(8):  # until every copy is bound
        case.exchange(case.field)
    before = misses.read()
    clock = Clock()
    taken, count = timed(node, case, seconds, clock)
    found = {"call": median(taken)}
    if before is not None:
        found["cache misses"] = (misses.read() - before) / count
    if node.report().host_code == "compiled":
        return found
    wait = HostRoute._wait_until
    HostRoute._wait_until = clock.wrap("waiting", wait)
    try:
        put_clocks(case, clock)
        taken, count = timed(node, case, seconds, clock)
    finally:
        HostRoute._wait_until = wait
    parts, clocked = clock.parts(count)
    found.update(parts)
    found["Python"] = sum(taken) / TURNS - clocked - sum(parts.values())
    return found


def show(node, ndims, case, kind, found):
    """Print a row: the means over the ranks."""
    rows = node.comm.gather(found)
    if not node.is_leader:
        return
    cells = []
    for column in COLUMNS:
        values = [row[column] for row in rows if column in row]
        scale = 1 if column == "cache misses" else 1e6
        cells.append(f"{scale * sum(values) / len(values):.3g}" if values else "-")
    print(HEAD.format(node.size, ndims, case.face_nbytes, kind, *cells), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dims", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--faces", type=int, nargs="+", default=[8, 4096, 65536, 1 << 20])
    parser.add_argument("--seconds", type=float, default=0.4, help="per row, twice")
    options = parser.parse_args()
    misses = CacheMisses()
    with mpishare.Node(backend="host") as node:
        if node.is_leader:
            if misses.why_not:
                print(f"The counter of cache misses cannot be read: {misses.why_not}.")
            how = "compiled C" if node.report().host_code == "compiled" else "Python"
            print(f"Exchanges are made by {how}.\n")
            print(HEAD.format("ranks", "dims", "face, B", "fields", *COLUMNS))
            print("|" + "---|" * (4 + len(COLUMNS)))
        for ndims, nbytes, kind in product(options.dims, options.faces, ("window", "private")):
            with closing(Case(node, ndims, nbytes, kind)) as case:
                show(node, ndims, case, kind, profile(node, case, misses, options.seconds))


if __name__ == "__main__":
    main()

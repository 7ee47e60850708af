"""What an exchange on the host backend takes: by the compiled part, and by the reference in NumPy.

mpirun -n 2 python scripts/lib/host_profile.py [--help]

Prints a row per dimensions, face and kind of fields: microseconds per exchange of one float64
field, back to back in batches of a millisecond: medians of the maxima over the ranks.
"""

import argparse
import os
import time
from contextlib import closing
from itertools import product
from statistics import median

import numpy as np
from mpi4py import MPI

import mpishare

WIDTH, BATCH_S = 1, 1e-3
CODES = ("compiled", "python")
HEAD = "| {:5} | {:4} | {:>9} | {:8} | {:>9} | {:>9} |"


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

    def close(self):
        self._plan.close()
        if self._window is not None:
            self._window.close()
        self._comm.Free()


def timed(node, case, seconds):
    """Microseconds per exchange."""

    def batch(count):
        node.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            case.exchange(case.field)
        return node.comm.allreduce(time.perf_counter() - begin, MPI.MAX) / count

    count = max(1, int(BATCH_S / median(batch(20) for _ in range(9))))
    turns = max(9, int(seconds / BATCH_S))
    return 1e6 * median(batch(count) for _ in range(turns))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dims", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--faces", type=int, nargs="+", default=[8, 4096, 65536, 1 << 20])
    parser.add_argument("--seconds", type=float, default=0.4, help="per row and code")
    options = parser.parse_args()
    nodes = []
    for code in CODES:
        os.environ["MPISHARE_HOST_CODE"] = code
        nodes.append(mpishare.Node(backend="host"))
    is_leader, nranks = nodes[0].is_leader, nodes[0].size
    if is_leader:
        print(HEAD.format("ranks", "dims", "face, B", "fields", *CODES))
        print("|" + "---|" * (4 + len(CODES)))
    for ndims, nbytes, kind in product(options.dims, options.faces, ("window", "private")):
        row = []
        for node in nodes:
            with closing(Case(node, ndims, nbytes, kind)) as case:
                row.append(f"{timed(node, case, options.seconds):.3g}")
        if is_leader:
            print(HEAD.format(nranks, ndims, case.face_nbytes, kind, *row), flush=True)
    for node in nodes:
        node.close()


if __name__ == "__main__":
    main()

"""Time mpi4py-fft's transposes and whole FFTs by messages and by mpishare, in turns.

    mpirun -n 2 python -m mpi4py mpi4py_fft_time.py [--sizes 32 64] [--memory gpu]

First slab and pencil transforms must give the same bits both ways. Then one transpose of a cube,
and a forward and a backward transform of it, take turns in one process; a time is that of the
slowest rank, and of a round the mean of its calls. With ``--memory gpu`` the arrays are CuPy's, and
only transposes are compared: by messages each goes through the host.
"""

import argparse

import mpishare_fft
import numpy as np
from mpi4py import MPI
from mpi4py_fft import PFFT, newDistArray
from mpi4py_fft.pencil import Pencil, Subcomm
from turns import report, times

import mpishare

COMM = MPI.COMM_WORLD


class Staged:
    """A `Transfer` of CuPy's arrays by messages, through host memory."""

    def __init__(self, transfer):
        self._transfer = transfer

    def forward(self, given, out):
        """Copy to the host, send, copy back."""
        host = np.empty(out.shape, out.dtype)
        self._transfer.forward(given.get(), host)
        out.set(host)


def each_way(node, make):
    """Return what `make` returns by messages, and by mpishare."""
    made = {}
    for name, given in (("before", None), ("after", node)):
        mpishare_fft.use(given)
        made[name] = make()
    return made


def compare(node):
    """Abort unless slab and pencil transforms give the same bits both ways."""
    for shape in ((12, 14, 10), (13, 9, 11)):
        for grid in ((0, 1, 1), (0, 0, 1)):
            for dtype in "fdFD":
                found = each_way(node, lambda g=grid, s=shape, d=dtype: transformed(g, s, d))
                assert found["before"] == found["after"], (shape, grid, dtype)


def transformed(grid, shape, dtype):
    """Return the bytes of a transform, of the way back, and of a redistributed array."""
    fft = PFFT(Subcomm(COMM, grid), shape, dtype=dtype)
    u = newDistArray(fft, False)
    u[...] = np.random.default_rng(COMM.rank).random(u.shape)
    turned = np.asarray(u.redistribute(0)).tobytes()
    there = fft.forward(u)
    bits = np.asarray(there).tobytes(), np.asarray(fft.backward(there)).tobytes(), turned
    fft.destroy()
    return bits


def transposes(node, xp, n, dtype):
    """Return one transpose of a cube each way, as a function of no argument."""
    subcomm = Subcomm(COMM, (0, 1, 1))
    first = Pencil(subcomm, (n, n, n), axis=1)
    second = first.pencil(0)
    a = xp.asarray(np.random.default_rng(COMM.rank).random(first.subshape).astype(dtype))
    b = xp.empty(second.subshape, dtype)
    made = each_way(node, lambda: first.transfer(second, dtype))
    if xp is not np:
        made["before"] = Staged(made["before"])
    found = []
    for each in made.values():
        each.forward(a, b)
        found.append(b.tobytes())
    assert found[0] == found[1]
    return {name: lambda t=each: t.forward(a, b) for name, each in made.items()}


def transforms(node, n, dtype):
    """Return a transform of a cube and its way back, each way, as a function of no argument."""

    def make():
        fft = PFFT(Subcomm(COMM, (0, 1, 1)), (n, n, n), dtype=dtype)
        fft.forward.input_array[...] = 1

        def step():
            fft.forward()
            fft.backward()

        return step

    return each_way(node, make)


def main():
    """Compare, then time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="*", default=(32, 64, 128, 256))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--memory", choices=("host", "gpu"), default="host")
    options = parser.parse_args()
    on_gpu = options.memory == "gpu"
    with mpishare.Node(backend="cuda" if on_gpu else "host") as node:
        if not on_gpu:
            compare(node)
            if COMM.rank == 0:
                print(f"{COMM.size} ranks: the same bits", flush=True)
        if COMM.rank == 0 and options.sizes:
            print("| | before, us | after, us | ratio (quartiles) |\n|---|---|---|---|")
        for dtype in ("complex128", "float32"):
            for n in options.sizes:
                what = f"{n}^3 {dtype}"
                synchronize = node.xp.cuda.Device().synchronize if on_gpu else None
                forms = transposes(node, node.xp, n, dtype)
                report(f"transpose {what}", times(forms, options.rounds, synchronize=synchronize))
                if not on_gpu:
                    forms = transforms(node, n, dtype)
                    report(f"FFT {what}", times(forms, options.rounds, synchronize=synchronize))
        mpishare_fft.use(None)


if __name__ == "__main__":
    main()

"""Time mpi4py-fft's transposes and whole FFTs by messages and by mpishare, in turns.

    mpirun -n 2 python -m mpi4py mpi4py_fft_time.py [--sizes 32 64] [--pencils] [--memory gpu]

First slab and pencil transforms must give the same bits both ways. Then one transpose of a cube,
and a forward and a backward transform of it, take turns in one process; a time is that of the
slowest rank, and of a round the mean of its calls. With ``--pencils`` two axes are cut, not one.
With ``--memory gpu`` the arrays are CuPy's, by messages each transpose goes through pinned host
memory, and transforms are CuPy's around a transpose and its way back.
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
    """A `Transfer` of CuPy's arrays by messages, through pinned host memory that is kept."""

    def __init__(self, transfer):
        from cupyx import empty_pinned

        shapes = transfer.subshapeA, transfer.subshapeB
        self._transfer = transfer
        self._hosts = [empty_pinned(shape, transfer.dtype) for shape in shapes]

    def forward(self, given, out):
        """Copy to the host, send, copy back."""
        self._move(self._transfer.forward, given, out, *self._hosts)

    def backward(self, given, out):
        """Copy to the host, send back, copy back."""
        self._move(self._transfer.backward, given, out, *self._hosts[::-1])

    def _move(self, move, given, out, sent, received):
        given.get(out=sent)  # which waits, also for the last copy back
        move(sent, received)
        out.set(received)


def each_way(node, make):
    """Return what `make` returns by messages, and by mpishare."""
    made = {}
    for name, given in (("before", None), ("after", node)):
        mpishare_fft.use(given)
        made[name] = make()
    return made


def cases():
    """Yield shapes that do not divide evenly among the ranks, as slabs and as pencils, by dtype."""
    least = max(0, COMM.size - 9)  # no rank may be without cells
    for shape in ((12, 14, 10), (13, 9, 11)):
        for grid in ((0, 1, 1), (0, 0, 1)):
            for dtype in "fdFD":
                yield tuple(n + least for n in shape), grid, dtype


def compare_transposes(node):
    """Abort unless transposes give the same bits both ways."""
    for shape, grid, dtype in cases():
        transposes(node, node.xp, grid, shape, dtype)


def compare(node):
    """Abort unless slab and pencil transforms give the same bits both ways."""
    for shape, grid, dtype in cases():
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


def pencils(grid, shape):
    """Return the layouts of an array before and after a transpose."""
    axis = grid.index(1)
    first = Pencil(Subcomm(COMM, grid), shape, axis=axis)
    return first, first.pencil(axis - 1)


def transfers(node, xp, first, second, dtype):
    """Return what moves an array from one layout to another each way."""
    made = each_way(node, lambda: first.transfer(second, dtype))
    if xp is not np:
        made["before"] = Staged(made["before"])
    return made


def transposes(node, xp, grid, shape, dtype):
    """Return one transpose of an array each way, as a function of no argument."""
    first, second = pencils(grid, shape)
    a = xp.asarray(np.random.default_rng(COMM.rank).random(first.subshape).astype(dtype))
    b, c = xp.empty(second.subshape, dtype), xp.empty(first.subshape, dtype)
    made = transfers(node, xp, first, second, dtype)
    found = []
    for each in made.values():
        each.forward(a, b)
        each.backward(b, c)
        assert c.tobytes() == a.tobytes(), (grid, shape, dtype)
        found.append(b.tobytes())
    assert found[0] == found[1], (grid, shape, dtype)
    return {name: lambda t=each: t.forward(a, b) for name, each in made.items()}


def transforms(node, grid, n, dtype):
    """Return a transform of a cube and its way back, each way, as a function of no argument."""

    def make():
        fft = PFFT(Subcomm(COMM, grid), (n, n, n), dtype=dtype)
        fft.forward.input_array[...] = 1

        def step():
            fft.forward()
            fft.backward()

        return step

    return each_way(node, make)


def transforms_on_gpus(node, n, dtype):
    """Return the same of slabs on GPUs, by CuPy's transforms."""
    xp, is_real = node.xp, dtype == "float32"
    forward, backward = (xp.fft.rfftn, xp.fft.irfftn) if is_real else (xp.fft.fftn, xp.fft.ifftn)
    first, second = pencils((0, 1, 1), (n, n, n // 2 + 1 if is_real else n))
    number = "complex64" if is_real else dtype
    u = np.random.default_rng(COMM.rank).random((first.subshape[0], n, n))
    u = xp.asarray(u.astype(dtype))
    made = transfers(node, xp, first, second, number)

    def step(transfer):
        across = xp.empty(second.subshape, number)
        transfer.forward(xp.ascontiguousarray(forward(u, axes=(1, 2))), across)
        across = xp.ascontiguousarray(xp.fft.ifft(xp.fft.fft(across, axis=0), axis=0))
        back = xp.empty(first.subshape, number)
        transfer.backward(across, back)
        return backward(back, s=(n, n), axes=(1, 2))

    found = [step(each) for each in made.values()]
    assert found[0].tobytes() == found[1].tobytes()
    assert xp.allclose(found[0], u, atol=1e-5)
    return {name: lambda t=each: step(t) for name, each in made.items()}


def main():
    """Compare, then time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="*", default=(32, 64, 128, 256))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--pencils", action="store_true")
    parser.add_argument("--memory", choices=("host", "gpu"), default="host")
    options = parser.parse_args()
    on_gpu = options.memory == "gpu"
    grid = (0, 0, 1) if options.pencils else (0, 1, 1)
    with mpishare.Node(backend="cuda" if on_gpu else "host") as node:
        (compare_transposes if on_gpu else compare)(node)
        if COMM.rank == 0:
            print(f"{COMM.size} ranks: the same bits", flush=True)
        if COMM.rank == 0 and options.sizes:
            print("| | before, us | after, us | ratio (quartiles) |\n|---|---|---|---|")
        synchronize = node.xp.cuda.Device().synchronize if on_gpu else None
        for dtype in ("complex128", "float32"):
            for n in options.sizes:
                what = f"{n}^3 {dtype}"
                forms = transposes(node, node.xp, grid, (n, n, n), dtype)
                report(f"transpose {what}", times(forms, options.rounds, synchronize=synchronize))
                if on_gpu and options.pencils:
                    continue
                if on_gpu:
                    forms = transforms_on_gpus(node, n, dtype)
                else:
                    forms = transforms(node, grid, n, dtype)
                report(f"FFT {what}", times(forms, options.rounds, synchronize=synchronize))
        mpishare_fft.use(None)


if __name__ == "__main__":
    main()

"""Transposes and transforms of mpi4py-fft by messages and by mpishare, in turns: bits and times.

PYTHONPATH=../lib:../../docs/ports mpirun -n 2 python -m mpi4py mpi4py_fft_times.py [ROUNDS]

On GPUs messages go through pinned host memory, and there are transposes only.
"""

import mpishare_fft
import numpy as np
from in_turns import comm, compare, node, on_gpu, print_head
from mpi4py_fft import PFFT, newDistArray
from mpi4py_fft.pencil import Pencil, Subcomm

WAYS = "messages", "mpishare"
EXTENTS = 32, 64, 128, 256
if on_gpu():
    import cupy
    import cupyx


def use(way):
    """Let transfers made from now on go by messages, or by mpishare."""
    mpishare_fft.use(node() if way == "mpishare" else None, after=0)


def transpose(extent, dtype):
    """Return a transpose between slabs, and what it brings."""
    whole = Pencil(Subcomm(comm, [0, 1, 1]), (extent,) * 3, axis=1)
    transfer, random = whole.transfer(whole.pencil(0), dtype), np.random.default_rng(comm.rank)
    given = np.empty(transfer.subshapeA, dtype)
    given.real, given.imag = random.random((2, *given.shape))
    out = np.empty(transfer.subshapeB, dtype)
    call = lambda: transfer.forward(given, out)  # noqa: E731
    if on_gpu():
        call, out = of_gpu(transfer, given, out)
    call()
    return call, [out]


def of_gpu(transfer, given, out):
    """Return a transpose of the same arrays on the GPU, and what it brings."""
    source, target = cupy.asarray(given), cupy.empty_like(out)
    if isinstance(transfer, mpishare_fft.Transfer):
        return lambda: transfer.forward(source, target), target
    sent, received = (cupyx.empty_pinned(each.shape, each.dtype) for each in (given, out))

    def through_host():
        source.get(out=sent)
        transfer.forward(sent, received)
        target.set(received)

    return through_host, target


def transform(extent, dtype):
    """Return a transform there and back, and its coefficients."""
    plans = {"planner_effort": "FFTW_ESTIMATE"}  # the same for both ways
    fft = PFFT(comm, (extent,) * 3, dtype=dtype, slab=True, **plans)
    given, out = newDistArray(fft, False), newDistArray(fft, True)
    given[...] = np.random.default_rng(comm.rank).random(given.shape)

    def there_and_back():
        fft.forward(given, out)
        fft.backward(out, given)

    there_and_back()
    return there_and_back, [out]


print_head("mpi4py-fft", WAYS, "numpy", "mpi4py-fft")
for extent in EXTENTS:
    for dtype in "complex64", "complex128":
        compare(f"transpose {extent}^3 {dtype}", WAYS, transpose, extent, dtype, use=use)
    for dtype in () if on_gpu() else ("float32", "complex128"):
        compare(f"transform {extent}^3 {dtype}", WAYS, transform, extent, dtype, use=use)

"""Transposes and transforms of mpi4py-fft by messages and by mpishare, in turns: bits and times.

mpirun -n 2 python -m mpi4py mpi4py_fft_times.py [ROUNDS]
"""

import sys

import mpishare_fft
import numpy as np
from in_turns import comm, compare_bits, in_turns_us, print_head, print_line
from mpi4py_fft import PFFT, newDistArray

import mpishare

WAYS = "messages", "mpishare"
EXTENTS = 32, 64, 128, 256


def transpose(fft):
    """Return a transpose between slabs, and what it brings."""
    transfer, random = fft.transfer[0], np.random.default_rng(comm.rank)
    given = np.empty(transfer.subshapeA, transfer.dtype)
    given.real = random.random(given.shape)
    given.imag = random.random(given.shape)
    out = np.empty(transfer.subshapeB, transfer.dtype)
    return lambda: transfer.forward(given, out), out


def transform(fft):
    """Return a transform there and back, and its coefficients."""
    given, out = newDistArray(fft, False), newDistArray(fft, True)
    given[...] = np.random.default_rng(comm.rank).random(given.shape)

    def there_and_back():
        fft.forward(given, out)
        fft.backward(out, given)

    return there_and_back, out


rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
node = mpishare.Node(backend="host")
print_head("mpi4py-fft", WAYS)
for extent in EXTENTS:
    for dtype in "complex128", "float32":
        plans = {}
        for way in WAYS:
            mpishare_fft.use(node if way == "mpishare" else None)
            plans[way] = PFFT(comm, (extent,) * 3, dtype=dtype, slab=True)
        for make in transpose, transform:
            calls, found = {}, []
            for way, fft in plans.items():
                calls[way], out = make(fft)
                calls[way]()
                found.append([np.array(out)])
            times = in_turns_us(calls, rounds)
            print_line(f"{make.__name__} {extent}^3 {dtype}", times, compare_bits(*found))

"""Run tests of mpi4py-fft by pytest, with the plug-in or without.

mpirun -n 2 python -m mpi4py mpi4py_fft_tests.py with test_pencil.py
"""

import sys

import pytest
from mpi4py import MPI

way, *files = sys.argv[1:]
if way == "with":
    import mpishare_fft

    import mpishare

    mpishare_fft.use(mpishare.Node(backend="host"))
quiet = ["-q"] if MPI.COMM_WORLD.rank == 0 else ["-qqq", "--no-header", "--no-summary"]
sys.exit(pytest.main([*quiet, "-p", "no:cacheprovider", *files]))

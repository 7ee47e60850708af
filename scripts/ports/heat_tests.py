"""Run tests of Heat by pytest, with the plug-in or without.

mpirun -n 2 python -m mpi4py heat_tests.py with tests/core/test_communication.py
"""

import sys

import pytest
from mpi4py import MPI

way, *given = sys.argv[1:]
if way == "with":
    import mpishare_heat

    import mpishare

    mpishare_heat.LEAST_SUM = mpishare_heat.LEAST_BCAST = 0
    mpishare_heat.use(mpishare.Node(backend="host"), after=0)
quiet = ["-q"] if MPI.COMM_WORLD.rank == 0 else ["-qqq", "--no-header", "--no-summary"]
sys.exit(pytest.main([*quiet, "--disable-warnings", "-p", "no:cacheprovider", *given]))

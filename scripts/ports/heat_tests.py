"""Run tests of Heat by pytest, with the plug-in or without.

mpirun -n 2 python -m mpi4py heat_tests.py with tests/core/test_communication.py

HEAT_TEST_USE_DEVICE=gpu is Heat's own variable, and the plug-in has a node on GPUs then.
"""

import os
import sys

import pytest
from mpi4py import MPI

way, *given = sys.argv[1:]
if way == "with":
    import heat as ht
    import mpishare_heat

    import mpishare

    mpishare_heat.LEAST_SUM = mpishare_heat.LEAST_BCAST = 0
    if os.environ.get("HEAT_TEST_USE_DEVICE") == "gpu":
        node = mpishare.Node(backend="cuda", device=ht.gpu.device_id)
    else:
        node = mpishare.Node(backend="host")
    mpishare_heat.use(node, after=0)
quiet = ["-q"] if MPI.COMM_WORLD.rank == 0 else ["-qqq", "--no-header", "--no-summary"]
sys.exit(pytest.main([*quiet, "--disable-warnings", "-p", "no:cacheprovider", *given]))

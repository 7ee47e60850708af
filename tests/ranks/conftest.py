"""Started as `mpirun -n N python -m pytest tests/ranks`: all ranks run all tests in lockstep."""

import pytest
from mpi4py import MPI

# Its tests are for two ranks at most: to import PyTorch takes each rank seconds.
collect_ignore = ["test_torch.py"] if MPI.COMM_WORLD.size > 2 else []


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.import_plugin("tests.helpers.lockstep")
    config.pluginmanager.import_plugin("tests.helpers.nodes")
    config.pluginmanager.import_plugin("tests.helpers.view_fixtures")

"""Run tests of QuaTrEx by pytest, with the plug-in or without.

mpirun -n 3 python -m mpi4py quatrex_tests.py with tests/qttools/comm
"""

import sys

import pytest
from mpi4py import MPI

way, *given = sys.argv[1:]
if way == "with":
    import mpishare_quatrex
    from qttools.comm import comm

    import mpishare

    # Its tests name a back end of QuaTrEx for all that it does: plans instead, where there are any.
    def configure(block_comm_size, block_comm_config, stack_comm_config, override=False):
        """Configure with "mpishare" for each collective that would go by MPI."""
        configs = [dict(config) for config in (block_comm_config, stack_comm_config)]
        for config in configs:
            for name in mpishare_quatrex.COLLECTIVES:
                if config.get(name) == "device_mpi":
                    config[name] = "mpishare"
        by_messages(block_comm_size, *configs, override)

    by_messages = comm.configure
    comm.configure = configure
    mpishare_quatrex.use(mpishare.Node(backend="host"))
quiet = ["-q"] if MPI.COMM_WORLD.rank == 0 else ["-qqq", "--no-header", "--no-summary"]
quiet += ["--with-mpi", "--import-mode=importlib", "--disable-warnings", "-p", "no:cacheprovider"]
sys.exit(pytest.main([*quiet, *given]))

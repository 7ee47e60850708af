"""Run tests of QuaTrEx by pytest, with the plug-in or without.

mpirun -n 3 python -m mpi4py quatrex_tests.py with tests/qttools/comm

On GPUs each rank has to see its own alone: CUDA_VISIBLE_DEVICES names it.
"""

import sys

import pytest
from mpi4py import MPI

way, *given = sys.argv[1:]
if way == "with":
    import mpishare_quatrex
    from qttools import xp
    from qttools.comm import comm

    import mpishare

    # Its tests name a back end of QuaTrEx for all that it does: plans instead, where there are any.
    def configure(block_comm_size, block_comm_config, stack_comm_config, override=False):
        """Configure with "mpishare" for each collective that would go by MPI."""
        configs = [dict(config) for config in (block_comm_config, stack_comm_config)]
        for config in configs:
            for name in mpishare_quatrex.COLLECTIVES:
                if config.get(name) == of_tests:
                    config[name] = "mpishare"
        by_messages(block_comm_size, *configs, override)

    by_messages = comm.configure
    comm.configure = configure
    on_gpu = xp.__name__ == "cupy"
    of_tests = "host_mpi" if on_gpu else "device_mpi"
    mpishare_quatrex.use(mpishare.Node(backend="cuda" if on_gpu else "host"))
quiet = ["-q"] if MPI.COMM_WORLD.rank == 0 else ["-qqq", "--no-header", "--no-summary"]
quiet += ["--with-mpi", "--import-mode=importlib", "--disable-warnings", "-p", "no:cacheprovider"]
sys.exit(pytest.main([*quiet, *given]))

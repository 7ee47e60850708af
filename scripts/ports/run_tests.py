"""Run tests of a code by pytest, with its plug-in or without.

mpirun -n 2 python -m mpi4py run_tests.py heat with tests/core/test_communication.py

On GPUs where the code itself computes there: Heat by HEAT_TEST_USE_DEVICE=gpu, QuaTrEx by
QTX_ARRAY_MODULE=cupy. Each rank of QuaTrEx has to see its own GPU alone (CUDA_VISIBLE_DEVICES).
"""

import os
import sys

import pytest
from mpi4py import MPI


def use_dedalus():
    """Take mpishare for every transpose, whatever the configuration files say."""
    from dedalus.tools.config import config

    config["parallelism"]["TRANSPOSE_LIBRARY"] = "mpishare"


def use_distdl():
    """Move every halo, repartition and sum by a plan."""
    import mpishare_distdl

    import mpishare

    mpishare_distdl.use(mpishare.Node(backend="cuda" if "USE_CUDA" in os.environ else "host"))


def use_heat():
    """Send every call that has a plan by it, also those too small to be faster so."""
    import heat as ht
    import mpishare_heat

    import mpishare

    mpishare_heat.LEAST = mpishare_heat.LEAST_GATHER = 0
    mpishare_heat.FEW.clear()
    if os.environ.get("HEAT_TEST_USE_DEVICE") == "gpu":
        node = mpishare.Node(backend="cuda", device=ht.gpu.device_id)
    else:
        node = mpishare.Node(backend="host")
    mpishare_heat.use(node, after=0)


def use_mpi4py_fft():
    """Move every transpose by a plan."""
    import mpishare_fft

    import mpishare

    mpishare_fft.use(mpishare.Node(backend="host"), after=0)


def use_quatrex():
    """Take plans in place of the back end that its tests name for all that it does."""
    import mpishare_quatrex
    from qttools import xp
    from qttools.comm import comm

    import mpishare

    mpishare_quatrex.FEW = mpishare_quatrex.PAIR = 0

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


PLUG_INS = {
    "dedalus": use_dedalus,
    "distdl": use_distdl,
    "heat": use_heat,
    "mpi4py_fft": use_mpi4py_fft,
    "quatrex": use_quatrex,
}

code, way, *given = sys.argv[1:]
if way == "with":
    PLUG_INS[code]()
quiet = ["-q"] if MPI.COMM_WORLD.rank == 0 else ["-qqq", "--no-header", "--no-summary"]
quiet += ["--disable-warnings", "-p", "no:cacheprovider"]
sys.exit(pytest.main([*quiet, *given]))

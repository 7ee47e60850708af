"""What every layer shares: outcomes as a file, a limit on each test, GPU tests only with a GPU."""

import ctypes
import functools
import os
import shutil
import tempfile

import pytest

from tests.helpers import launch
from tests.helpers.compiled import WHY_NONE

pytest_plugins = ("tests.helpers.outcomes", "tests.helpers.guard", "tests.helpers.shares")

CUDA_ERROR_NO_DEVICE = 100


@functools.cache
def why_no_gpu() -> str:
    """Why GPU tests cannot run here, empty where they must.

    Narrow on purpose: a driver that fails in any other way is no reason to skip.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "libcuda.so.1 does not load"
    return "the driver sees no GPU" if driver.cuInit(0) == CUDA_ERROR_NO_DEVICE else ""


def pytest_configure(config: pytest.Config) -> None:
    # Of each process its own: those of ranks, and of parts that run beside each other, would clean
    # up one folder at once, in which pytest meets races that `filterwarnings = error` makes errors.
    if config.option.basetemp is None:
        config.option.basetemp = folder = tempfile.mkdtemp(prefix="pytest-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    if WHY_NONE:
        # Asked for, Python's code is no reason for a warning; many tests want none on stderr.
        os.environ.setdefault("MPISHARE_HOST_CODE", "python")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and why_no_gpu():
        pytest.skip(f"no GPU: {why_no_gpu()}")
    if item.get_closest_marker("recovery") and launch.launcher()[1] != "openmpi":
        pytest.skip("only Open MPI keeps the survivors of a killed rank")

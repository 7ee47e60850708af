"""What all tests share: some parameters of each instead of all, GPU tests only with a GPU.

The name of a file says how its tests run. `*_ranks.py` and `*_gpu.py` are for ranks in lockstep,
those of `*_gpu.py` on GPUs alone. They are collected only where they are asked for, by
`-o python_files='*_ranks.py'` or by name. `*_faults.py` start ranks of their own, which may die.
"""

import collections
import os
import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from _pytest._io import TerminalWriter

from mpishare.backends import presence
from tests.helpers import launch
from tests.helpers.compiled import WHY_NONE

IN_LOCKSTEP = re.compile(r"_(ranks|gpu)\.py")


def why_no_gpu() -> str:
    """Why GPU tests cannot run here, empty where they must.

    Narrow on purpose: a driver that fails in any other way is no reason to skip.
    """
    why = presence.why_no_gpu() or ""
    return why if why == presence.NO_DRIVER or why.endswith(presence.NONE_VISIBLE) else ""


def are_in_lockstep(config: pytest.Config) -> bool:
    """Whether tests for ranks in lockstep are asked for."""
    asked = [*config.getini("python_files"), *config.args]
    return any(IN_LOCKSTEP.search(text) for text in asked)


def pytest_addoption(parser: pytest.Parser) -> None:
    words = "of each test, run the first of each N sets of parameters; none of those marked whole"
    parser.addoption("--every", type=int, default=1, metavar="N", help=words)


def pytest_configure(config: pytest.Config) -> None:
    if not any(name.startswith(launch.OF_A_JOB) for name in os.environ):
        # `timeout` ends pytest as Ctrl-C does: the ranks that a test started are killed, and what
        # has failed so far is told. Ranks end at once: others may never come to the test's end.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        # Where pytest-timeout writes its tracebacks: xdist drops what its processes print.
        config.get_terminal_writer = lambda: TerminalWriter(sys.__stderr__)
    if are_in_lockstep(config):
        for name in ("lockstep", "nodes", "fixtures"):
            config.pluginmanager.import_plugin(f"tests.helpers.{name}")
    # Of each process its own: those of ranks, and of parts that run beside each other, would clean
    # up one folder at once, in which pytest meets races that `filterwarnings = error` makes errors.
    if config.option.basetemp is None:
        config.option.basetemp = folder = tempfile.mkdtemp(prefix="pytest-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    if WHY_NONE:
        # Asked for, Python's code is no reason for a warning; many tests want none on stderr.
        os.environ.setdefault("MPISHARE_HOST_CODE", "python")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what cannot run."""
    if IN_LOCKSTEP.search(collection_path.name) is None:
        return None
    if not are_in_lockstep(config):
        return True
    if collection_path.name == "test_torch_ranks.py":
        from mpi4py import MPI

        # Its tests are for two ranks at most: to import PyTorch takes each rank seconds.
        return True if MPI.COMM_WORLD.size > 2 else None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    counts = collections.Counter[str]()
    chosen, others = [], []
    for item in items:
        if item.path.name.endswith("_gpu.py"):
            item.add_marker("gpu")
        name = item.nodeid.partition("[")[0]
        is_whole = config.option.every > 1 and item.get_closest_marker("whole")
        (others if is_whole or counts[name] % config.option.every else chosen).append(item)
        counts[name] += 1
    if others:
        config.hook.pytest_deselected(items=others)
    items[:] = chosen


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and why_no_gpu():
        pytest.skip(f"no GPU: {why_no_gpu()}")
    if item.get_closest_marker("recovery") and launch.launcher()[1] != "openmpi":
        pytest.skip("only Open MPI keeps the survivors of a killed rank")

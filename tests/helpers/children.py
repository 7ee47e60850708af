"""Processes that tests start and which end by themselves. One that is told what to do: `Viewer`."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping

from tests.helpers.launch import ROOT, TIMEOUT_S


def python(
    source: str, *arguments: object, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run source in a process of its own; return its status and what it printed."""
    command = [sys.executable, "-c", source, *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )


def in_a_fork(work: Callable[[], object]) -> bool:
    """Whether `work` returns something true in a forked child, which ends then."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = int(not work())
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0

"""Trials in a child process, which may crash or hang where this process must not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

#: Where launchers describe the job to a rank. A child without these variables is a job of its own,
#: of one rank, with the same library and the same settings.
_OF_THE_JOB = ("HYDI_", "MPI_LOCAL", "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "PMI", "PRTE_", "SLURM_")
TRIAL_S = 60.0
"""A child starts MPI and a GPU in some seconds."""


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child that is not a rank of this job."""
    return {name: text for name, text in environment.items() if not name.startswith(_OF_THE_JOB)}


def run_in_child(program: Path, *arguments: object, timeout_s: float = TRIAL_S) -> str | None:
    """Return why a Python program failed in a child, None where it did not.

    Local, host-blocking: some seconds, and `timeout_s` at most. The arguments are the program's.
    """
    # -P: modules beside the program have names of other packages.
    command = [sys.executable, "-P", str(program), *map(str, arguments)]
    try:
        done = subprocess.run(  # noqa: S603 - a fixed command
            command,
            env=child_environment(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout_s:g} s"
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"ended by {signal.Signals(-done.returncode).name}"
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit status {done.returncode}"

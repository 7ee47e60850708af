"""Trials in a child process, which may crash or hang where this process must not."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from mpishare.runtime.outside import outside_environment

if TYPE_CHECKING:
    from pathlib import Path

# A child starts MPI and a GPU in some seconds.
TRIAL_S = 60.0


def run_in_child(program: Path, *arguments: object, timeout_s: float = TRIAL_S) -> str | None:
    """Return why a Python program failed in a child, None where it did not.

    Host-blocking: some seconds, and `timeout_s` at most.
    """
    import signal  # both here: they take milliseconds, and on the host nothing is tried
    import subprocess

    # -P: modules beside the program have names of other packages.
    command = [sys.executable, "-P", str(program), *map(str, arguments)]
    try:
        done = subprocess.run(  # noqa: S603 - a fixed command
            command,
            env=outside_environment(),
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

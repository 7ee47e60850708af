"""Jobs in a mount namespace of their own, where /dev/shm is what a test wants it to be."""

import os
import shlex
from pathlib import Path

import pytest

from tests.helpers import launch
from tests.helpers.isolation import why_refused

SMALL = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
"""Docker's default."""


def mount_before_jobs(monkeypatch: pytest.MonkeyPatch, folder: Path, command: str) -> None:
    """Let the jobs that this test starts run the command first; skip where the kernel refuses."""
    unshare = ["unshare", "-m" if os.geteuid() == 0 else "-Urm"]
    if why := why_refused([*unshare, "mount", "-t", "tmpfs", "tmpfs", launch.SHM]):
        pytest.skip(why)
    # What is to run out of room is mpishare and not Open MPI.
    monkeypatch.setenv("OMPI_MCA_btl_sm_backing_directory", str(folder))
    mpirun, kind = launch.launcher()
    wrapper = Path(folder, "mpirun")
    words = shlex.join([*unshare, "sh", "-c", f'{command} && exec "$@"', "sh", mpirun])
    wrapper.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setattr(launch, "launcher", lambda: (str(wrapper), kind))

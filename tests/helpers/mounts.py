"""Jobs in a mount namespace of their own, where /dev/shm is what a test wants it to be."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.helpers import launch

SMALL = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
"""Docker's default."""


def mount_before_jobs(monkeypatch: pytest.MonkeyPatch, folder: Path, command: str) -> None:
    """Let the jobs that this test starts run the command first; skip where the kernel refuses."""
    script = f'{command} && exec "$@"'
    way = ["unshare", "-m" if os.geteuid() == 0 else "-Urm", "sh", "-c", script, "sh"]
    tried = subprocess.run([*way, "true"], capture_output=True, text=True, check=False)
    if any(word in tried.stderr for word in ("denied", "not permitted")):
        pytest.skip(f"no mount namespace here: {tried.stderr.strip()}")
    assert tried.returncode == 0, tried.stderr
    # What is to run out of room is mpishare and not Open MPI.
    monkeypatch.setenv("OMPI_MCA_btl_sm_backing_directory", str(folder))
    mpirun, kind = launch.launcher()
    wrapper = Path(folder, "mpirun")
    unshare, option, *rest = way
    words = " ".join(f"'{word}'" for word in (option, *rest))
    wrapper.write_text(f'#!/bin/sh\nexec {unshare} {words} "{mpirun}" "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setattr(launch, "launcher", lambda: (str(wrapper), kind))

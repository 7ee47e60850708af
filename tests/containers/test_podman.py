"""Real containers, of Podman, with one rank each and with all: the flags of docs/containers.md."""

import json
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.helpers.isolation import Podman, why_no_podman
from tests.helpers.launch import SHM, launcher, run_ranks

REASON = why_no_podman()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

SHARED = ["--ipc=host", "--pid=host"]


@pytest.fixture
def podman(monkeypatch: pytest.MonkeyPatch) -> Generator[Podman]:
    """Containers that leave nothing behind after the test: no mount, file or process."""
    names = set(SHM.iterdir())
    made = Podman()
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    yield made
    made.remove()
    assert made.folder.name not in Path("/proc/mounts").read_text()
    assert not [name for name in set(SHM.iterdir()) - names if "libpod" in name.name]


def info(podman, monkeypatch, options, deadline_s=40.0):
    """What the report tool says of two ranks, each in a container with these options."""
    podman.put_before_ranks(monkeypatch, options)
    words = [sys.executable, "-m", "mpishare.info", "--timeout-s", str(deadline_s)]
    # Not by an open file, which Podman closes.
    port = ["-pmi-port"] if launcher()[1] == "mpich" else []
    env = {"MPISHARE_BACKEND": "host"}
    return run_ranks(2, words, env=env, extra_mpirun=port, timeout_s=50)


def test_everything_is_shared(podman, monkeypatch):
    """Host names differ, which is all the same; limits on memory are named."""
    result = info(podman, monkeypatch, [*SHARED, "--memory=150m"])
    assert result.returncode == 0, result.describe()
    assert ": 2 ranks, backend host" in result.stdout, result.describe()
    assert "in Podman" in result.stdout
    assert "CMA works" in result.stdout
    assert "their own namespaces: uts" in result.stdout
    # The room in /dev/shm is that of the machine.
    assert "memory limited to 150 MiB" in result.stdout


def test_reads_are_forbidden_by_seccomp(podman, monkeypatch, tmp_path):
    """Large faces are packed instead, and the report names the cause."""
    rule = {"names": ["process_vm_readv"], "action": "SCMP_ACT_ERRNO"}
    profile = tmp_path / "seccomp.json"
    profile.write_text(json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [rule]}))
    result = info(podman, monkeypatch, [*SHARED, f"--security-opt=seccomp={profile}"])
    assert result.returncode == 0, result.describe()
    assert ": 2 ranks, backend host" in result.stdout
    assert "no CMA: rank 0 cannot read memory of rank 1" in result.stdout
    assert "--cap-add=SYS_PTRACE" in result.stdout


def test_the_defaults(podman, monkeypatch):
    """Every container has a /dev/shm of its own, with which MPICH never starts."""
    if launcher()[1] != "mpich":
        pytest.skip("as in test_namespaces.py")
    result = info(podman, monkeypatch, [], deadline_s=1.0)
    assert not result.timed_out, result.describe()
    assert result.returncode != 0
    assert "--ipc=host" in result.stderr, result.describe()


def test_mpirun_in_the_container(podman):
    """All ranks of a machine in one container: they share what it has, 64 MB of /dev/shm."""
    words = [sys.executable, "-m", "mpishare.info"]
    result = run_ranks(
        2, words, before=podman.command([]), env={"MPISHARE_BACKEND": "host"}, timeout_s=30
    )
    assert result.returncode == 0, result.describe()
    assert ": 2 ranks, backend host" in result.stdout
    assert "/dev/shm of 62.5 MiB" in result.stdout
    assert "CMA works" in result.stdout

"""Real containers, of Podman, with one rank each and with all: the flags of docs/containers.md."""

import errno
import functools
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

from mpishare.coordination.poll import poll
from tests.helpers.isolation import put_before_ranks, why_no_namespaces
from tests.helpers.launch import ROOT, SHM, launcher, run_ranks

PROGRAMS = ("podman", "runc", "conmon")


class Podman:
    """Containers whose root folder is that of this machine; nothing stays after `remove`."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pod-"))  # Podman wants a short name
        self._parent = self.folder.name
        self._root = self.folder / "root"
        self._root.mkdir()
        conf = self.folder / "containers.conf"
        conf.write_text('[engine]\nlock_type="file"\n')  # else there is a file of it in /dev/shm
        self.environment = {"CONTAINERS_CONF": str(conf)}
        stores = [f"--root={self.folder}/store", f"--runroot={self.folder}/run"]
        stores += [f"--tmpdir={self.folder}/tmp", "--storage-driver=vfs", "--runtime=runc"]
        self._podman = ["podman", *stores, "--cgroup-manager=cgroupfs", "--log-level=error"]
        self._volumes = []
        for each in Path("/").iterdir():
            if each.is_symlink():
                (self._root / each.name).symlink_to(each.readlink())
            elif each.is_dir():
                (self._root / each.name).mkdir()
                if each.name not in {"dev", "proc", "sys", "run"}:  # which a container has itself
                    self._volumes.append(f"--volume={each}:{each}")

    def command(self, options: Sequence[str]) -> list[str]:
        """The words before a command that is to run in a container."""
        # What a machine without CAP_SYS_RESOURCE can grant.
        limits = ["--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024"]
        return [
            *self._podman, "run", f"--cgroup-parent=/{self._parent}", "--network=host",
            "--env-host", *limits, *self._volumes, f"--workdir={ROOT}", *options,
            "--rootfs", str(self._root),
        ]  # fmt: skip

    def put_before_ranks(self, monkeypatch: pytest.MonkeyPatch, options: Sequence[str]) -> None:
        """Start each rank of the jobs of this test in a container."""
        words = shlex.join(self.command(options))
        put_before_ranks(monkeypatch, self.folder / "contain", f'#!/bin/bash\nexec {words} "$@"\n')

    def remove(self) -> None:
        """End the containers, and remove what they have left."""
        remove = [*self._podman, "rm", "--all", "--force", "--time=0"]
        variables = {**os.environ, **self.environment}
        subprocess.run(remove, env=variables, check=True, capture_output=True)
        for group in Path("/sys/fs/cgroup").glob(f"*/{self._parent}"):
            for path, _, _ in os.walk(group, topdown=False):
                assert poll(functools.partial(_is_removed, Path(path)), 5, pause_s=0.01), path
        shutil.rmtree(self.folder)


def _is_removed(group: Path) -> bool:
    """Whether a control group could be removed: not while a process of it ends."""
    try:
        group.rmdir()
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True


@functools.cache
def why_no_podman() -> str | None:
    """Why Podman's containers cannot be run here; None where they can."""
    if why_no_namespaces():
        return why_no_namespaces()
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    return f"missing: {', '.join(missing)} (Debian packages podman and runc)" if missing else None


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
    return run_ranks(2, words, env=env, extra_mpirun=port)


def test_everything_is_shared(podman, monkeypatch):
    """Host names differ, which is all the same."""
    result = info(podman, monkeypatch, SHARED)
    assert result.returncode == 0, result.describe()
    assert ": 2 ranks, backend host" in result.stdout, result.describe()
    assert "no CMA" not in result.stdout


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
    """Every container has a /dev/shm of its own, with which MPICH never starts.

    What the first rank says at its deadline is in test_namespaces.py: mpirun kills the containers
    when that rank ends, and Podman may not have written it by then.
    """
    if launcher()[1] != "mpich":
        pytest.skip("as in test_namespaces.py")
    result = info(podman, monkeypatch, [], deadline_s=1.0)
    assert not result.timed_out, result.describe()
    assert result.returncode != 0
    assert "backend host" not in result.stdout, result.describe()


def test_mpirun_in_the_container(podman):
    """All ranks of a machine in one container."""
    words = [sys.executable, "-m", "mpishare.info"]
    result = run_ranks(2, words, before=podman.command([]), env={"MPISHARE_BACKEND": "host"})
    assert result.returncode == 0, result.describe()
    assert ": 2 ranks, backend host" in result.stdout
    assert "no CMA" not in result.stdout

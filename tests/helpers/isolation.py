"""Ranks in containers of their own: pretended by unshare, and real ones of Podman."""

import errno
import functools
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from mpishare.coordination.poll import poll
from tests.helpers.launch import ROOT

OWN = {
    "mount": (["--mount"], ":"),
    "ipc": (["--ipc"], ":"),
    "net": (["--net"], ":"),
    "pid": (["--pid", "--fork", "--mount-proc", "--kill-child"], ":"),
    # Behind "pid", by which alone each rank is process 1.
    "other ids": ([], 'for _ in $(seq "${PMI_RANK:-$OMPI_COMM_WORLD_RANK}"); do (:); done'),
    "user": (["--user", "--map-root-user"], ":"),
    "uts": (["--uts"], 'hostname "container-${PMI_RANK:-$OMPI_COMM_WORLD_RANK}"'),
    # Docker's default size.
    "shm": (["--mount"], "mount -t tmpfs -o size=64m tmpfs /dev/shm"),
    # A folder inside the machine's /dev/shm in place of it: the same device, other files.
    "folder": (["--mount"], 'mount --bind "$(mktemp -d -p "$SHM_FOLDER")" /dev/shm'),
}
"""By what a rank has of its own: the options of unshare, and what is done inside before it starts.
"""

_PODMAN = ("podman", "runc", "conmon")


@functools.cache
def why_no_namespaces() -> str | None:
    """Why containers cannot be pretended here; None where they can."""
    if os.geteuid():
        return "it needs root"
    return why_refused(["unshare", "-mpiun", "--fork", "--mount-proc", "true"])


def why_refused(command: Sequence[str | Path]) -> str | None:
    """Why a command of unshare cannot be run here; None where it can."""
    try:
        tried = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return f"{command[0]} is not installed"
    return f"no such namespace here: {tried.stderr.strip()}" if tried.returncode else None


def separate_ranks(
    monkeypatch: pytest.MonkeyPatch, folder: Path, own: Sequence[str], *, is_init: bool = True
) -> None:
    """Let each rank of the jobs that this test starts have these of its own.

    In a PID namespace it is process 1, as in most containers, unless `is_init` is false: that one
    cannot be killed from within. What was before the ranks already comes behind.
    """
    unshare = ["unshare", *dict.fromkeys(option for name in own for option in OWN[name][0])]
    if why := why_refused([*unshare, "true"]):
        pytest.skip(why)
    first = " && ".join(OWN[name][1] for name in own)
    before = os.environ.get("RANK_WRAPPER", "")
    start = f'exec {before} "$@"' if is_init else f'{before} "$@"; exit $?'
    words = [*unshare, "bash", "-c", f"{first} && {start}", "bash"]
    text = f'#!/bin/bash\nexec {shlex.join(words)} "$@"\n'
    _put_before_ranks(monkeypatch, folder / "separate", text)


def _put_before_ranks(monkeypatch: pytest.MonkeyPatch, file: Path, text: str) -> None:
    file.write_text(text)
    file.chmod(0o755)
    monkeypatch.setenv("RANK_WRAPPER", str(file))


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
        _put_before_ranks(monkeypatch, self.folder / "contain", f'#!/bin/bash\nexec {words} "$@"\n')

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
    missing = [name for name in _PODMAN if not shutil.which(name)]
    return f"missing: {', '.join(missing)} (Debian packages podman and runc)" if missing else None

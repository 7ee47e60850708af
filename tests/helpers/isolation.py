"""Ranks in containers of their own, pretended by unshare."""

import functools
import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

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
    put_before_ranks(monkeypatch, folder / "separate", text)


def put_before_ranks(monkeypatch: pytest.MonkeyPatch, file: Path, text: str) -> None:
    file.write_text(text)
    file.chmod(0o755)
    monkeypatch.setenv("RANK_WRAPPER", str(file))

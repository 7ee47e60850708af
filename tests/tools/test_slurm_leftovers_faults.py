"""scripts/test-slurm leaves no process, group or file: at its end, and when a signal ends it."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.launch import OF_A_JOB, ROOT

SCRIPT = ROOT / "scripts" / "test-slurm"
HOLD = "test_holds_until_it_is_ended"
PATIENCE_S = 60


def descendants(pid: int) -> dict[int, str]:
    """Every process that a process started, and those started; with the command of each.

    A daemon becomes a child of the first process of its namespace, which is one of them.
    """
    found, new = {}, [pid]
    while new:
        parent = new.pop()
        with contextlib.suppress(OSError):  # gone
            command = Path(f"/proc/{parent}/cmdline").read_bytes().decode().replace("\0", " ")
            found[parent] = command or Path(f"/proc/{parent}/comm").read_text()
            for task in Path(f"/proc/{parent}/task").iterdir():
                new += map(int, (task / "children").read_text().split())
    return found


def processes_with(variable: bytes) -> list[str]:
    """Return every process whose environment begins a variable like this."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone
            if b"\0" + variable in b"\0" + (entry / "environ").read_bytes():
                found.append(f"{entry.name} {(entry / 'cmdline').read_bytes()!r}")
    return found


def groups() -> set[Path]:
    return {*Path("/sys/fs/cgroup").glob("*/mpishare-slurm-*")}


@pytest.fixture(scope="module")
def usable() -> None:
    tried = subprocess.run([SCRIPT, "--check"], capture_output=True, text=True, check=False)
    if tried.returncode == 77:
        pytest.skip(tried.stderr.strip())
    assert tried.returncode == 0, tried.stderr


@contextlib.contextmanager
def started(*words: str) -> Iterator[subprocess.Popen[str]]:
    """Start the script, and see that nothing of it is there in the end."""
    before = groups()
    kept = {k: v for k, v in os.environ.items() if not k.startswith(OF_A_JOB)}
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [SCRIPT, *words],
            env=kept | {"TMPDIR": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
        assert processes_with(f"TMPDIR={folder}".encode()) == []
        assert list(Path(folder).iterdir()) == []
        assert groups() == before


@pytest.mark.limit(150)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_after_a_signal(usable, number):
    with started("-s", "-k", HOLD) as process:
        said = ""
        for line in process.stdout:
            said += line
            if "holding" in line:
                break
        assert "holding" in said, said
        running = descendants(process.pid)
        for daemon in ("slurmctld", "slurmd", "slurmstepd"):
            assert any(daemon in words for words in running.values()), running
        begin = time.monotonic()
        os.killpg(process.pid, number)  # as a terminal does at Ctrl-C
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 128 + number
        assert time.monotonic() - begin < 10
        assert [pid for pid in running if Path(f"/proc/{pid}").exists()] == []


@pytest.mark.limit(150)
def test_nothing_is_left_at_its_end(usable):
    """Of a job with control groups and mounts of its own."""
    with started("-k", "test_steps_of_a_job_share_its_own_shm and mpich") as process:
        said, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, said
        assert "1 passed" in said or "1 skipped" in said, said

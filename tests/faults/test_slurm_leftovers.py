"""scripts/test-slurm leaves nothing when it is ended by a signal: no process, group or file."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
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


def groups() -> set[Path]:
    return {*Path("/sys/fs/cgroup").glob("*/mpishare-slurm-*")}


@pytest.fixture(scope="module")
def usable() -> None:
    tried = subprocess.run([SCRIPT, "--check"], capture_output=True, text=True, check=False)
    if tried.returncode == 77:
        pytest.skip(tried.stderr.strip())
    assert tried.returncode == 0, tried.stderr


@pytest.mark.limit(150)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_after_a_signal(usable, number):
    before = groups()
    kept = {k: v for k, v in os.environ.items() if not k.startswith(OF_A_JOB)}
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [SCRIPT, "-s", "-k", HOLD],
            env=kept | {"TMPDIR": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said = ""
            for line in process.stdout:
                said += line
                if "holding" in line:
                    break
            assert "holding" in said, said
            running = descendants(process.pid)
            for daemon in ("slurmctld", "slurmd", "slurmstepd"):
                assert any(daemon in words for words in running.values()), running
            assert list(Path(folder).iterdir())
            begin = time.monotonic()
            os.killpg(process.pid, number)  # as a terminal does at Ctrl-C
            process.communicate(timeout=PATIENCE_S)
        finally:
            if process.poll() is None:
                process.kill()
        assert process.returncode == 128 + number
        assert time.monotonic() - begin < 10
        assert [pid for pid in running if Path(f"/proc/{pid}").exists()] == []
        assert list(Path(folder).iterdir()) == []
        assert groups() == before

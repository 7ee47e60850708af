"""A part of the GPU suite that runs too long is cut off, says so and keeps what it had."""

import re
import subprocess
import sys

import pytest

from scripts.lib.tally import read
from tests.helpers.launch import ROOT

SOURCE = """
import subprocess, sys, time
def test_first(): pass
def test_second(): {second}
def test_third(): pass
"""


@pytest.fixture
def limited(tmp_path):
    """Run three tests, the second of them with this body, as the part "waits"."""

    def run(second, *, seconds=30, options=()):
        (tmp_path / "test_it.py").write_text(SOURCE.format(second=second))
        script = f'set -euo pipefail; source {ROOT}/scripts/lib/limited.sh; limited "$@"'
        own = ["-c", ROOT / "pyproject.toml", "-p", "tests.conftest", *options]
        pytest_on_it = [sys.executable, "-m", "pytest", *own, tmp_path / "test_it.py"]
        command = ["bash", "-c", script, "bash", str(seconds), "waits", tmp_path, *pytest_on_it]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=50
        )
        file = tmp_path / "waits.xml"
        passed, failed, _ = read(file) if file.exists() else (0, [], [])
        return done, (passed, len(failed)), (tmp_path / "waits.end").read_text().strip()

    return run


@pytest.mark.parametrize(
    ("second", "options", "status", "end", "counts"),
    [
        ("pass", {}, 0, "passed", (3, 0)),
        ("pass", {"options": ["-k", "no_such_name"]}, 0, "passed", (0, 0)),
        # pytest counts the one that is cut as passed, its part says that it was not.
        ("time.sleep(40)", {"seconds": 8}, 124, r"cut off after \d+ s", (2, 0)),
        ("assert False", {}, 1, r"failed .* s, exit status 1", (2, 1)),
        # The exit status of a limit, before the limit.
        ("import os; os._exit(124)", {}, 124, r"failed after .*", (0, 0)),
    ],
)
def test_how_a_part_ends(limited, second, options, status, end, counts):
    done, found, words = limited(second, **options)
    assert done.returncode == status, done.stdout + done.stderr
    assert re.fullmatch(end, words)
    assert found == counts
    if "seconds" in options:
        assert f"== waits: {words}" in done.stdout
        # It ended by itself, and told where it was, which may be in pytest.
        assert "KeyboardInterrupt" in done.stdout + done.stderr

"""A part of the GPU suite that runs too long is cut off, says so and keeps what it had."""

import subprocess
import sys

import pytest

from tests.helpers.launch import ROOT
from tests.helpers.outcomes import read

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
        own = ["-c", ROOT / "pyproject.toml", "-p", "tests.helpers.outcomes", *options]
        pytest_on_it = [sys.executable, "-m", "pytest", *own, tmp_path / "test_it.py"]
        command = ["bash", "-c", script, "bash", str(seconds), "waits", tmp_path, *pytest_on_it]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=50
        )
        file = tmp_path / "waits.jsonl"
        tests = read(file) if file.exists() else {}
        outcomes = {test.split("::")[-1]: result["outcome"] for test, result in tests.items()}
        return done, outcomes, (tmp_path / "waits.end").read_text().strip()

    return run


def test_a_part_that_passes(limited):
    done, outcomes, end = limited("pass")
    assert done.returncode == 0, done.stdout + done.stderr
    assert end == "passed"
    assert set(outcomes.values()) == {"passed"}
    assert len(outcomes) == 3


def test_a_part_that_takes_too_long_is_cut_off_and_keeps_its_outcomes(limited):
    done, outcomes, end = limited("time.sleep(40)", seconds=3)
    assert done.returncode == 124, done.stdout + done.stderr
    assert end.startswith("cut off after ")
    assert f"== waits: {end}" in done.stdout
    assert outcomes == {"test_first": "passed", "test_second": "unfinished"}
    assert "KeyboardInterrupt" in done.stdout  # it ended by itself, and told where it was


def test_a_part_that_fails_is_not_called_cut_off(limited):
    done, outcomes, end = limited("assert False")
    assert done.returncode == 1
    assert end.startswith("failed after ")
    assert end.endswith(" s, exit status 1")
    assert outcomes == {"test_first": "passed", "test_second": "failed", "test_third": "passed"}


def test_the_exit_status_of_a_limit_before_the_limit_is_a_failure(limited):
    done, outcomes, end = limited("import os; os._exit(124)")
    assert done.returncode == 124
    assert end.startswith("failed after ")
    assert outcomes == {"test_first": "passed", "test_second": "unfinished"}


def test_no_test_of_this_kind_is_no_failure(limited):
    done, outcomes, end = limited("pass", options=["-k", "nothing_of_this_name"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert (outcomes, end) == ({}, "passed")

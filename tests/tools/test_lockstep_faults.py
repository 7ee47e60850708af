"""The guards of the rank tests, each seen to work: a failure, a hang and a crash on one rank."""

import sys
from pathlib import Path

import pytest

from scripts.lib.tally import read
from tests.helpers.launch import ROOT, Result, run_ranks


def run_pytest(folder: Path, source: str, *, n: int = 3) -> Result:
    (folder / "test_sample.py").write_text(
        f"import os, time, pytest\nfrom mpi4py import MPI\nrank = MPI.COMM_WORLD.rank\n{source}"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=no", "-c"]
    command += [str(ROOT / "pyproject.toml"), "--junitxml", str(folder / "outcomes.xml")]
    command += ["-p", "tests.helpers.lockstep"]
    return run_ranks(n, [*command, str(folder)])


def test_how_each_test_ends(tmp_path):
    """As its ranks say where they agree; else it has failed, and each rank says why."""
    source = """
def test_sum():
    assert MPI.COMM_WORLD.allreduce(rank) == 3
@pytest.mark.ranks(min=3)
def test_three(): pass
@pytest.mark.ranks(max=2)
def test_two(): pass
@pytest.mark.xfail
def test_known(): assert rank < 0
def test_skip(): pytest.skip("everywhere")
def test_fails():
    assert rank != 2, "the words of the last rank"
@pytest.fixture
def broken():
    if rank == 1: raise ValueError("the words of a fixture")
def test_setup(broken): MPI.COMM_WORLD.Barrier()
def test_after(): MPI.COMM_WORLD.Barrier()
def test_skip_of_one():
    if rank == 1: pytest.skip("only here")
@pytest.mark.xfail(strict=False)
def test_known_to_some(): assert rank == 1
"""
    result = run_pytest(tmp_path, source)
    assert result.returncode == 1, result.describe()
    counts = "3 failed, 3 passed, 1 skipped, 1 deselected, 1 xfailed, 1 error"
    assert result.stdout.count(counts) == 1, result.describe()
    assert "the words of the last rank" in result.stdout
    assert "failed on ranks [2] of 3" in result.stdout
    assert "the words of a fixture" in result.stdout
    assert "skipped on ranks [1] of 3 only" in result.stdout
    passed, failed, reasons = read(tmp_path / "outcomes.xml")
    assert (passed, reasons) == (3, ["", "everywhere"])
    wrong = ("test_fails", "test_setup", "test_skip_of_one", "test_known_to_some")
    assert failed == [f"test_sample::{name}" for name in wrong]


WAITS = {"hang": "time.sleep(100)", "barrier": "MPI.COMM_WORLD.Barrier()", "crash": "os.abort()"}


@pytest.mark.parametrize("kind", WAITS)
def test_a_hang_and_a_crash_end_by_themselves_and_say_where(tmp_path, kind):
    source = f"""
def wait_for_nobody():
    {WAITS[kind]}
@pytest.mark.timeout(4 + rank / 5)
def test_waits():
    if rank == 0: raise ValueError("the words of the one that left")
    wait_for_nobody()
"""
    result = run_pytest(tmp_path, source, n=2)
    assert not result.timed_out, result.describe()
    assert result.returncode != 0
    assert "wait_for_nobody" in result.stderr
    assert kind == "crash" or "the words of the one that left" in result.stderr
    assert not (tmp_path / "outcomes.xml").exists()


@pytest.mark.parametrize("line", ["1 / 0", "def test_mine(): pass"])
def test_ranks_that_collect_different_tests_are_told(tmp_path, line):
    result = run_pytest(tmp_path, f"def test_all(): pass\nif rank == 1:\n    {line}\n", n=2)
    assert not result.timed_out, result.describe()
    assert result.returncode != 0
    assert "the ranks collected different tests" in result.stdout + result.stderr

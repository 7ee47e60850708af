"""The last line of scripts/test counts what ran, and what did not run when it had to."""

import os
import subprocess
import sys

import pytest

from scripts.lib import tally
from tests.helpers.launch import OF_A_JOB, ROOT

TESTS = """
import os, pytest

@pytest.mark.skipif(True, reason="of a mark")
def test_mark(): pass
def test_call(): pytest.skip("in a call,\\nof two lines")
@pytest.mark.xfail(reason="not yet")
def test_known(): assert False
def test_passes(): pass
"""
MODULE = 'import pytest\npytest.importorskip("no_such_package", reason="it is not installed")\n'
SKIPS = [f"skipped 1: {why}" for why in ("of a mark", "in a call, of two lines", "not yet")]
SKIPS += ["skipped 1: it is not installed"]


@pytest.fixture
def told(tmp_path):
    """The lines behind the steps, of which "unit" are real tests with these ones more."""

    def tell(source, *others):
        (tmp_path / "test_skips.py").write_text(TESTS + source)
        (tmp_path / "test_module.py").write_text(MODULE)
        command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", tmp_path]
        kept = {name: text for name, text in os.environ.items() if not name.startswith(OF_A_JOB)}
        done = subprocess.run(
            [*command, "--junitxml", tmp_path / "unit.xml"],
            capture_output=True, env=kept, check=False,
        )  # fmt: skip
        steps = [f"tests\tunit\t{done.returncode}", *others]
        (tmp_path / "steps").write_text("\n".join(steps))
        lines, has_failed = tally.tally(tmp_path)
        assert has_failed == (" 0 failed" not in lines[-1])
        return lines

    return tell


@pytest.mark.parametrize(
    ("source", "failures", "passed"),
    [
        ("", [], 1),
        ("def test_fails(): assert False", ["test_skips::test_fails"], 1),
        ("@pytest.fixture\ndef bad(): 1 / 0\ndef test_it(bad): pass", ["test_skips::test_it"], 1),
    ],
)
def test_each_failure_and_each_reason_is_named(told, source, failures, passed):
    *lines, last = told(source)
    assert [line for line in lines if "skipped" not in line] == [
        f"failed: unit: {name}" for name in failures
    ]
    assert sorted(lines[len(failures) :]) == sorted(SKIPS)
    assert last == f"{passed} passed, {len(failures)} failed, 4 skipped"


def test_tests_that_die_have_failed(told):
    assert told("def test_dies(): os._exit(0)") == [
        "failed: unit: exit status 0, 0 passed",
        "0 passed, 1 failed, 0 skipped",
    ]


def test_steps_count(told):
    steps = ("check\tlint\t0", "check\ttypes\t1", "tests\tother\t124", "skip\tslurm\tno root")
    *_, last = lines = told("", *steps)
    assert last == "2 passed, 2 failed, 5 skipped"
    assert lines[:2] == [
        "failed: types: exit status 1, 0 passed",
        "failed: other: exit status 124, 0 passed",
    ]
    assert "skipped 1: the step slurm: no root" in lines


def test_no_step_at_all_is_a_failure(tmp_path):
    (tmp_path / "steps").write_text("")
    assert tally.tally(tmp_path) == (["0 passed, 0 failed, 0 skipped"], True)

"""The last line of scripts/test counts what ran, and what did not run when it had to."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.helpers.launch import OF_A_JOB, ROOT

spec = importlib.util.spec_from_file_location("tally", ROOT / "scripts" / "lib" / "tally.py")
tally_module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tally_module)


def tally(folder, steps, **layers):
    """The lines that are printed behind the steps."""
    (folder / "steps").write_text("".join(f"{kind}\t{name}\t{end}\n" for kind, name, end in steps))
    for name, outcomes in layers.items():
        tests = [{"test": f"t{i}", "outcome": outcome} for i, outcome in enumerate(outcomes)]
        for test in tests:
            test.update({"reason": "no GPU"} if test["outcome"] == "skipped" else {})
        lines = "".join(f"{json.dumps(test)}\n" for test in tests)
        (folder / f"{name}.jsonl").write_text(lines)
    return tally_module.tally(folder)[0]


@pytest.mark.parametrize(
    ("status", "outcomes", "last"),
    [
        (0, ["passed", "passed", "skipped"], "3 passed, 0 failed, 1 skipped"),
        (1, ["passed", "failed"], "2 passed, 1 failed, 0 skipped"),
        (1, ["passed", "unfinished"], "2 passed, 1 failed, 0 skipped"),
        (0, ["skipped"], "1 passed, 0 failed, 1 skipped"),
        (5, [], "1 passed, 1 failed, 0 skipped"),
        (0, [], "1 passed, 1 failed, 0 skipped"),  # ran no test
        (124, ["passed"], "2 passed, 1 failed, 0 skipped"),  # badly, with no test to blame
    ],
)
def test_counts(tmp_path, status, outcomes, last):
    steps = [("check", "lint", 0), ("tests", "unit", status)]
    assert tally(tmp_path, steps, unit=outcomes)[-1] == last


def test_a_failed_check_and_a_missing_file_count(tmp_path):
    lines = tally(tmp_path, [("check", "lint", 1), ("tests", "unit", 1)])
    last = "0 passed, 2 failed, 0 skipped"
    assert lines == ["failed: lint", "failed: unit: exit status 1", last]


def test_no_step_at_all_is_a_failure(tmp_path):
    assert tally(tmp_path, [])[-1] == "0 passed, 1 failed, 0 skipped"


def test_a_step_that_was_left_out_is_skipped_by_name(tmp_path):
    """And the skips of all steps are told once for each reason."""
    steps = [("tests", "unit", 0), ("skip", "slurm", "it needs root"), ("tests", "faults", 0)]
    unit, faults = ["passed", "skipped", "skipped"], ["skipped"]
    assert tally(tmp_path, steps, unit=unit, faults=faults) == [
        "skipped 3: no GPU",
        "skipped 1: the step slurm: it needs root",
        "1 passed, 0 failed, 4 skipped",
    ]


SKIPS = """
import pytest

@pytest.mark.skipif(True, reason="of a mark")
def test_mark(): pass
def test_call(): pytest.skip("in a call,\\nof two lines")
@pytest.mark.xfail(reason="not yet")
def test_known(): assert False
def test_passes(): pass
"""
MODULE = 'import pytest\npytest.importorskip("no_such_package", reason="it is not installed")\n'


def test_each_skip_has_its_reason(tmp_path):
    """Also that of a module which cannot be imported here."""
    (tmp_path / "test_skips.py").write_text(SKIPS)
    (tmp_path / "test_module.py").write_text(MODULE)
    (tmp_path / "steps").write_text("tests\tunit\t0\n")
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml")]
    command += ["-p", "tests.helpers.outcomes", "--outcomes", str(tmp_path / "unit.jsonl")]
    kept = {name: text for name, text in os.environ.items() if not name.startswith(OF_A_JOB)}
    subprocess.run([*command, tmp_path], check=True, capture_output=True, env=kept)
    command = [sys.executable, "-m", "scripts.lib.tally", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    *skips, last = done.stdout.strip().splitlines()
    assert last == "1 passed, 0 failed, 4 skipped"
    assert sorted(skips) == [
        "skipped 1: expected to fail: not yet",
        "skipped 1: in a call, of two lines",
        "skipped 1: it is not installed",
        "skipped 1: of a mark",
    ]

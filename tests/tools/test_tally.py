"""The last line of scripts/test counts what ran, and what did not run when it had to."""

import json
import os
import subprocess
import sys

import pytest

from scripts.lib import tally
from tests.helpers.launch import OF_A_JOB, ROOT


def told(folder, steps, **layers):
    """The lines that are printed behind the steps."""
    (folder / "steps").write_text("".join(f"{kind}\t{name}\t{end}\n" for kind, name, end in steps))
    for name, outcomes in layers.items():
        reasons = ({"reason": "no GPU"} if each == "skipped" else {} for each in outcomes)
        tests = zip(range(len(outcomes)), outcomes, reasons, strict=True)
        lines = [json.dumps({"test": f"t{n}", "outcome": each} | why) for n, each, why in tests]
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return tally.tally(folder)[0]


@pytest.mark.parametrize(
    ("steps", "outcomes", "lines"),
    [
        ("check lint 0", ["passed", "skipped"], ["skipped 1: no GPU", "2 passed, 0 failed, 1"]),
        ("check lint 1", ["passed"], ["failed: lint", "1 passed, 1 failed, 0"]),
        ("skip slurm no", [], ["failed: unit: ran no test", "skipped 1: the step", "0 passed, 1"]),
        ("tests unit 0", ["unfinished"], ["failed: unit: t0 unfinished", "0 passed, 1 failed, 0"]),
        # Badly, with no test to blame.
        ("tests unit 124", ["passed"], ["failed: unit: exit status 124", "1 passed, 1 failed, 0"]),
        ("tests other 1", ["passed"], ["failed: other: exit status 1", "1 passed, 1 failed, 0"]),
    ],
)
def test_counts(tmp_path, steps, outcomes, lines):
    steps = [steps.split()] if "unit" in steps else [steps.split(), ("tests", "unit", 0)]
    found = told(tmp_path, steps, unit=outcomes)
    assert len(found) == len(lines)
    assert all(map(str.startswith, found, lines)), found


def test_no_step_at_all_is_a_failure(tmp_path):
    assert told(tmp_path, [])[-1] == "0 passed, 1 failed, 0 skipped"


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

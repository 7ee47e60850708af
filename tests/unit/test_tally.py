"""The last line of scripts/test counts what ran, and what did not run when it had to."""

import importlib.util
import json

import pytest

from tests.helpers.launch import ROOT

spec = importlib.util.spec_from_file_location("tally", ROOT / "scripts" / "lib" / "tally.py")
tally_module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tally_module)


def tally(folder, steps, **layers):
    (folder / "steps").write_text("".join(f"{kind}\t{name}\t{n}\n" for kind, name, n in steps))
    for name, outcomes in layers.items():
        tests = [{"test": f"t{i}", "outcome": outcome} for i, outcome in enumerate(outcomes)]
        lines = "".join(f"{json.dumps(test)}\n" for test in tests)
        (folder / f"{name}.jsonl").write_text(lines)
    return tally_module.tally(folder)[1:]


@pytest.mark.parametrize(
    ("status", "outcomes", "expected"),
    [
        (0, ["passed", "passed", "skipped"], (3, 0)),
        (1, ["passed", "failed"], (2, 1)),
        (1, ["passed", "unfinished"], (2, 1)),
        (0, ["skipped"], (1, 1)),  # ran no test
        (5, [], (1, 1)),
        (124, ["passed"], (2, 1)),  # ended badly, with no test to blame
    ],
)
def test_counts(tmp_path, status, outcomes, expected):
    steps = [("check", "lint", 0), ("tests", "unit", status)]
    assert tally(tmp_path, steps, unit=outcomes) == expected


def test_a_failed_check_and_a_missing_file_count(tmp_path):
    assert tally(tmp_path, [("check", "lint", 1), ("tests", "unit", 1)]) == (0, 2)


def test_no_step_at_all_is_a_failure(tmp_path):
    assert tally(tmp_path, []) == (0, 1)

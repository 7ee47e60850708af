"""The cache of the GPU evidence accepts what was seen to pass and nothing else."""

import json
import shutil
import subprocess

import pytest

from tests.gpu import evidence


def make_run(name="gpus1", n_gpus=1, *, sha256="now", ok=True, **outcomes):
    tests = {test: {"outcome": outcome, "seconds": 0.1} for test, outcome in outcomes.items()}
    gpus = [f"NVIDIA X GPU-{i}" for i in range(n_gpus)]
    return {
        "configuration": name,
        "date": "2026-01-01",
        "gpus": gpus,
        "ok": ok,
        "sources_sha256": sha256,
        "tests": tests,
    }


def check(*runs, tests=("a", "b"), unproven=()):
    return evidence.problems({"unproven": [*unproven], "runs": [*runs]}, [*tests], "now")


def test_tests_that_passed_in_some_run_are_proven():
    errors, notes = check(make_run(a="passed", b="skipped"), make_run("masked", b="passed"))
    assert (errors, notes) == ([], [])


@pytest.mark.parametrize("outcome", ["skipped", None])
def test_a_test_that_never_passed_is_an_error(outcome):
    outcomes = {"b": outcome} if outcome else {}
    errors, _ = check(make_run(a="passed", **outcomes))
    assert len(errors) == 1
    assert errors[0].startswith("b: not seen to pass")


@pytest.mark.parametrize("outcome", ["failed", "unfinished"])
def test_a_failure_is_an_error_even_where_another_run_passed(outcome):
    errors, _ = check(make_run(a="passed", b="passed"), make_run("masked", ok=False, b=outcome))
    assert errors == [f"b: {outcome} in masked of 2026-01-01"]


def test_a_run_that_did_not_end_is_an_error():
    errors, _ = check(make_run(a="passed", b="passed", ok=False))
    assert errors == ["gpus1 of 2026-01-01 did not end well"]


def test_what_is_named_unproven_is_accepted_and_said():
    errors, notes = check(make_run(a="passed"), unproven=["b"])
    assert errors == []
    assert notes == ["UNPROVEN, passed on no GPU yet: b"]


def test_a_failure_of_what_is_named_unproven_is_accepted_and_said():
    errors, notes = check(make_run(a="passed", b="failed"), tests=["a"], unproven=["b"])
    assert errors == []
    assert notes == ["UNPROVEN, failed in gpus1 of 2026-01-01: b"]


def test_changed_sources_are_only_said():
    errors, notes = check(make_run(a="passed", b="passed", sha256="then"))
    assert errors == []
    assert notes == ["the sources have changed since gpus1 of 2026-01-01"]


def test_a_run_replaces_the_last_of_its_kind_alone():
    kept = {"unproven": [], "runs": []}
    for run in (make_run(a="failed"), make_run(n_gpus=4), make_run("masked"), make_run(a="passed")):
        evidence.add(kept, run)
    assert [(r["configuration"], len(r["gpus"]), r["tests"]) for r in kept["runs"]] == [
        ("gpus1", 1, make_run(a="passed")["tests"]),
        ("gpus1", 4, {}),
        ("masked", 1, {}),
    ]


def test_the_file_has_one_line_a_test():
    kept = {"unproven": [], "runs": [make_run(a="passed", b="failed")]}
    text = evidence.dumps(kept)
    assert json.loads(text) == kept
    assert '"a": {"outcome": "passed", "seconds": 0.1},\n' in text


@pytest.fixture
def tree(tmp_path):
    for name in ("mpishare/a.py", "tests/gpu/test_b.py", "tests/gpu/evidence.json", "README.md"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


def test_the_hash_sees_the_sources_and_not_the_rest(tree):
    before = evidence.sources_sha256(tree)
    (tree / "README.md").write_text("changed")
    (tree / "tests/gpu/evidence.json").write_text("changed")
    (tree / "mpishare/__pycache__").mkdir()
    (tree / "mpishare/__pycache__/a.pyc").write_text("made")
    assert evidence.sources_sha256(tree) == before
    (tree / "mpishare/a.py").write_text("changed")
    assert evidence.sources_sha256(tree) != before


def test_a_moved_file_changes_the_hash(tree):
    before = evidence.sources_sha256(tree)
    (tree / "mpishare/a.py").rename(tree / "mpishare/c.py")
    assert evidence.sources_sha256(tree) != before


@pytest.mark.skipif(shutil.which("git") is None, reason="no git here")
def test_the_hash_is_the_same_with_git_and_without(tree):
    before = evidence.sources_sha256(tree)
    subprocess.run(["git", "init", "--quiet", tree], check=True)
    assert evidence.sources_sha256(tree) == before
    subprocess.run(["git", "-C", tree, "add", "--all"], check=True)
    assert evidence.sources_sha256(tree) == before
    (tree / ".gitignore").write_text("*.tmp\n")
    (tree / "mpishare/x.tmp").write_text("ignored")
    assert evidence.sources_sha256(tree) == before


def test_the_file_is_read_as_it_is():
    kept = evidence.load()
    assert set(kept) == {"unproven", "runs"}
    json.dumps(kept)

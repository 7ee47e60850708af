"""The cache of the GPU evidence accepts what was seen to pass and nothing else."""

import argparse
import json
import shutil
import subprocess

import pytest

from tests.gpu import evidence


def make_run(name="gpus1", n_gpus=1, *, sha256="now", ok=True, parts=None, **outcomes):
    tests = {test: {"outcome": outcome, "seconds": 0} for test, outcome in outcomes.items()}
    gpus = [f"NVIDIA X GPU-{i}" for i in range(n_gpus)]
    return {
        "configuration": name,
        "date": "2026-01-01",
        "gpus": gpus,
        "ok": ok,
        "parts": parts or {},
        "sources_sha256": sha256,
        "tests": tests,
    }


def check(*runs, tests=("a", "b"), unproven=None):
    return evidence.problems({"unproven": unproven or {}, "runs": [*runs]}, [*tests], "now")


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


def test_a_part_that_was_cut_off_is_an_error_even_where_all_its_tests_are_accepted():
    parts = {"ranks": "passed", "waits": "cut off after 119 s"}
    run = make_run(ok=False, parts=parts, a="passed", b="cut-off")
    errors, _ = check(run, unproven={"b": "new"})
    assert errors == ["part waits was cut off after 119 s in gpus1 of 2026-01-01"]


def test_a_test_that_was_cut_off_is_an_error():
    errors, _ = check(make_run(a="passed", b="passed"), make_run("masked", ok=False, b="cut-off"))
    assert errors == ["b: cut-off in masked of 2026-01-01"]


def test_what_is_named_unproven_is_accepted_and_said():
    errors, notes = check(make_run(a="passed"), unproven={"b": "new"})
    assert errors == []
    assert notes == ["UNPROVEN, passed on no GPU yet: b (new)"]


def test_a_failure_of_what_is_named_unproven_is_accepted_and_said():
    errors, notes = check(make_run(a="passed", b="failed"), tests=["a"], unproven={"b": "new"})
    assert errors == []
    assert notes == ["UNPROVEN, failed in gpus1 of 2026-01-01: b (new)"]


def test_what_is_named_unproven_has_a_reason():
    errors, _ = check(make_run(a="passed"), unproven={"b": ""})
    assert errors == ["b: unproven without a reason"]


def test_what_passed_everywhere_is_not_unproven():
    errors, _ = check(make_run(a="passed", b="passed"), unproven={"b": "new", "gone": "renamed"})
    assert errors == [
        f"{test}: needs no place among the unproven tests any more" for test in ("b", "gone")
    ]


def test_changed_sources_are_only_said():
    errors, notes = check(make_run(a="passed", b="passed", sha256="then"))
    assert errors == []
    assert notes == ["the sources have changed since gpus1 of 2026-01-01"]


def test_a_run_replaces_the_last_of_its_kind_alone():
    kept = {"unproven": {}, "runs": []}
    for run in (make_run(a="failed"), make_run(n_gpus=4), make_run("masked"), make_run(a="passed")):
        evidence.add(kept, run)
    assert [(r["configuration"], len(r["gpus"]), r["tests"]) for r in kept["runs"]] == [
        ("gpus1", 1, make_run(a="passed")["tests"]),
        ("gpus1", 4, {}),
        ("masked", 1, {}),
    ]


def test_the_file_has_a_row_per_test_and_a_column_per_run():
    first = make_run(a="passed", b="failed")
    first["tests"]["a"]["seconds"] = 12
    kept = {
        "unproven": {"c": "two GPUs"},
        "runs": [first, make_run("masked", 2, b="passed", c="skipped")],
    }
    text = evidence.dumps(kept)
    assert evidence.loads(text) == kept
    header, _, unproven, table = text.split("\n\n")
    assert 'configuration\t"gpus1"\n' in header
    assert unproven == "unproven\nc\ttwo GPUs"
    assert table.splitlines() == [
        "test\tgpus1 on 1\tmasked on 2",
        "a\tpassed 12\t-",
        "b\tfailed\tpassed",
        "c\t-\tskipped",
    ]


def test_a_file_without_runs_is_read_as_it_was_written():
    kept = {"unproven": {}, "runs": []}
    assert evidence.loads(evidence.dumps(kept)) == kept


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Record a run of parts: {name: (outcomes or None, end or None)}; returns it."""
    monkeypatch.setattr(evidence, "gpus", lambda: (["NVIDIA X GPU-0"], "1.0"))
    monkeypatch.setattr(evidence, "versions", dict)

    def run(configuration="gpus1", **parts):
        for name, (outcomes, end) in parts.items():
            if outcomes is not None:
                tests = [{"test": t, "outcome": o, "seconds": 0.1} for t, o in outcomes.items()]
                lines = "".join(f"{json.dumps(test)}\n" for test in tests)
                (tmp_path / f"{name}.jsonl").write_text(lines)
            if end is not None:
                (tmp_path / f"{name}.end").write_text(f"{end}\n")
        options = argparse.Namespace(
            file=tmp_path / "evidence.tsv",
            configuration=configuration,
            ranks=1,
            mps=False,
            masks=False,
            outcomes=[tmp_path / f"{name}.jsonl" for name in parts],
        )
        ok = evidence.record(options)
        found = evidence.load(options.file)["runs"]
        assert found[-1]["ok"] is ok
        return found[-1]

    return run


def test_a_run_whose_parts_passed_is_recorded(record, capsys):
    run = record(ranks=({"a": "passed"}, "passed"), faults=({"b": "skipped"}, "passed"))
    assert run["ok"]
    assert {test: result["outcome"] for test, result in run["tests"].items()} == {
        "a": "passed",
        "b": "skipped",
    }
    assert capsys.readouterr().out == "gpus1: passed (1 passed, 1 skipped)\n"


def test_configurations_are_recorded_after_each_other_into_one_file(record):
    record(ranks=({"a": "passed"}, "passed"))
    record("masked", ranks=({"b": "passed"}, "passed"))
    kept = record("onegpu-ranks4", ranks=({"a": "passed"}, "passed"))
    assert kept["configuration"] == "onegpu-ranks4"


def test_a_part_that_was_cut_off_is_told_from_one_that_failed(record, capsys):
    end = "cut off after 119 s"
    run = record(ranks=({"a": "passed"}, "passed"), waits=({"b": "unfinished"}, end))
    assert not run["ok"]
    assert run["parts"] == {"ranks": "passed", "waits": end}
    assert run["tests"]["b"]["outcome"] == "cut-off"
    assert capsys.readouterr().out == f"gpus1: CUT OFF (waits {end}, 1 cut-off, 1 passed)\n"
    run = record(ranks=({"a": "failed"}, "failed after 9 s, exit status 1"), waits=({}, end))
    assert capsys.readouterr().out.startswith("gpus1: FAILED (ranks failed after 9 s,")


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (({"b": "unfinished"}, "failed after 9 s, exit status 1"), "1 unfinished"),
        (({"b": "passed"}, "failed after 9 s, exit status 9"), "waits failed after 9 s"),
        ((None, "failed after 9 s, exit status 2"), "waits no outcomes"),
        ((None, None), "waits no outcomes"),
        (({}, "passed"), "FAILED ()"),
    ],
)
def test_a_run_that_did_not_pass_whole_is_not_good(record, capsys, part, said):
    assert not record(waits=part)["ok"]
    printed = capsys.readouterr().out
    assert printed.startswith("gpus1: FAILED (")
    assert said in printed


@pytest.fixture
def tree(tmp_path):
    for name in ("mpishare/a.py", "tests/gpu/test_b.py", "tests/gpu/evidence.tsv", "README.md"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


def test_the_hash_sees_the_sources_and_not_the_rest(tree):
    before = evidence.sources_sha256(tree)
    (tree / "README.md").write_text("changed")
    (tree / "tests/gpu/evidence.tsv").write_text("changed")
    (tree / "mpishare/__pycache__").mkdir()
    (tree / "mpishare/__pycache__/a.pyc").write_text("made")
    (tree / "mpishare/compiled.so").write_text("built")
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
    assert evidence.dumps(kept) == evidence.FILE.read_text()
    assert kept["runs"]
    assert all(run["tests"] for run in kept["runs"])

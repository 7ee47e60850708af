"""The cache of the GPU evidence accepts what was seen to pass and nothing else."""

import argparse
import json
import shutil
import subprocess

import pytest

from tests.gpu import evidence

DAY = "2026-01-01"
UNPROVEN_YET = "UNPROVEN, passed on no GPU yet"


def make_run(name="gpus1", n_gpus=1, *, ok=True, parts=None, **outcomes):
    tests = {test: {"outcome": outcome, "seconds": 0} for test, outcome in outcomes.items()}
    gpus = [f"NVIDIA X GPU-{i}" for i in range(n_gpus)]
    return {
        "configuration": name,
        "date": DAY,
        "gpus": gpus,
        "ok": ok,
        "parts": parts or {},
        "sources_sha256": "now",
        "tests": tests,
    }


PASSED = make_run(a="passed", b="passed")
PARTS = {"ranks": "passed", "waits": "cut off after 119 s"}
NEW = {"b": "new"}
NO_REASON, NO_PLACE = (
    "b: unproven without a reason",
    "needs no place among the unproven tests any more",
)
CHANGED = f"the sources have changed since gpus1 of {DAY}"
NOT_SEEN = "b: not seen to pass on a GPU; scripts/test-gpu adds a run"


@pytest.mark.parametrize(
    ("runs", "unproven", "errors", "notes"),
    [
        ([make_run(a="passed", b="skipped"), make_run("masked", b="passed")], {}, [], []),
        ([make_run(a="passed", b="skipped")], {}, [NOT_SEEN], []),
        ([make_run(a="passed")], {}, [NOT_SEEN], []),
        # Failed, though it passed in another run.
        *(
            (
                [PASSED, make_run("masked", ok=False, b=end)],
                {},
                [f"b: {end} in masked of {DAY}"],
                [],
            )
            for end in ("failed", "unfinished", "cut-off")
        ),
        ([PASSED | {"ok": False}], {}, [f"gpus1 of {DAY} did not end well"], []),
        (
            [make_run(ok=False, parts=PARTS, a="passed", b="cut-off")],
            NEW,
            [f"part waits was cut off after 119 s in gpus1 of {DAY}"],
            [f"UNPROVEN, cut-off in gpus1 of {DAY}: b (new)", f"{UNPROVEN_YET}: b (new)"],
        ),
        ([make_run(a="passed")], NEW, [], [f"{UNPROVEN_YET}: b (new)"]),
        ([make_run(a="passed")], {"b": ""}, [NO_REASON], [f"{UNPROVEN_YET}: b ()"]),
        ([PASSED], {"b": "new", "gone": "renamed"}, [f"b: {NO_PLACE}", f"gone: {NO_PLACE}"], []),
        ([PASSED | {"sources_sha256": "then"}], {}, [], [CHANGED]),
    ],
)
def test_what_is_proven(runs, unproven, errors, notes):
    found = evidence.problems({"unproven": unproven, "runs": runs}, ["a", "b"], "now")
    assert found == (errors, notes)


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


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Record a run of parts: {name: (outcomes or None, end or None)} in a file of several runs."""
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
        (found,) = [
            run
            for run in evidence.load(options.file)["runs"]
            if run["configuration"] == configuration
        ]
        assert found["ok"] is ok
        return found

    return run


CUT = "cut off after 119 s"


@pytest.mark.parametrize(
    ("waits", "said"),
    [
        (({"b": "skipped"}, "passed"), "passed (1 passed, 1 skipped)"),
        (({"b": "unfinished"}, CUT), f"CUT OFF (waits {CUT}, 1 cut-off, 1 passed)"),
        (({"b": "failed"}, CUT), f"FAILED (waits {CUT}, 1 failed, 1 passed)"),
        (({"b": "unfinished"}, "failed"), "FAILED (waits failed, 1 passed, 1 unfinished)"),
        (({"b": "passed"}, "failed after 9 s"), "FAILED (waits failed after 9 s, 2 passed)"),
        ((None, "failed after 9 s"), "FAILED (waits no outcomes, 1 passed)"),
        ((None, None), "FAILED (waits no outcomes, 1 passed)"),
    ],
)
def test_a_run_is_recorded_with_how_its_parts_ended(record, capsys, waits, said):
    record("first", ranks=({"a": "passed"}, "passed"))
    assert not record(empty=({}, "passed"))["ok"]  # a run of no test
    capsys.readouterr()
    run = record(ranks=({"a": "passed"}, "passed"), waits=waits)
    assert run["ok"] == said.startswith("passed")
    assert capsys.readouterr().out == f"gpus1: {said}\n"


@pytest.fixture
def tree(tmp_path):
    for name in ("mpishare/a.py", "tests/gpu/test_b.py", "tests/gpu/evidence.tsv", "README.md"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


@pytest.mark.parametrize("has_git", [False, True])
def test_the_hash_sees_the_sources_and_not_the_rest(tree, has_git):
    before = evidence.sources_sha256(tree)
    if has_git:
        if shutil.which("git") is None:
            pytest.skip("no git here")
        subprocess.run(["git", "init", "--quiet", tree], check=True)
        subprocess.run(["git", "-C", tree, "add", "--all"], check=True)
        (tree / ".gitignore").write_text("*.pyc\n*.so\n")
    (tree / "README.md").write_text("changed")
    (tree / "tests/gpu/evidence.tsv").write_text("changed")
    (tree / "mpishare/__pycache__").mkdir()
    (tree / "mpishare/__pycache__/a.pyc").write_text("made")
    (tree / "mpishare/compiled.so").write_text("built")
    assert evidence.sources_sha256(tree) == before
    (tree / "mpishare/a.py").rename(tree / "mpishare/c.py")
    moved = evidence.sources_sha256(tree)
    (tree / "mpishare/c.py").write_text("changed")
    assert len({before, moved, evidence.sources_sha256(tree)}) == 3


def test_the_file_is_read_as_it_is():
    kept = evidence.load()
    assert evidence.dumps(kept) == evidence.FILE.read_text()
    assert kept["runs"]
    assert all(run["tests"] for run in kept["runs"])

"""A run on GPUs proves what it ran, for the sources that it ran, and nothing else."""

import sys

import pytest

from tests.gpu import evidence

CUT = "cut off after 119 s"
#: What `tally.read`, which test_tally.py tries, finds of a part.
PARTS = {
    "ranks": (1, [], ["no NVLink", "passes"]),
    "waits": (1, ["waits::test_bad"], ["no NVLink"]),
}


@pytest.fixture
def record(tmp_path, monkeypatch, capsys):
    """Record a run of parts, with how each ended; return it, and what is printed."""
    monkeypatch.setattr(evidence, "gpus", lambda: (["NVIDIA X GPU-0"], "1.0"))
    monkeypatch.setattr(evidence, "versions", dict)
    monkeypatch.setattr(evidence, "read", lambda file: PARTS[file.stem])
    for name in PARTS:
        (tmp_path / f"{name}.xml").touch()

    def run(**ends):
        for name, end in ends.items():
            (tmp_path / f"{name}.end").write_text(f"{end}\n")
        words = ["evidence", "--folder", str(tmp_path), "record", "--configuration", "gpus1"]
        words += ["--ranks", "1", *(str(tmp_path / f"{name}.xml") for name in ends)]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            evidence.main()
        (found,) = evidence.load(tmp_path)
        assert found["ok"] == (ended.value.code == 0)
        return found, capsys.readouterr().out.strip()

    return run


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ({"ranks": "passed"}, "passed (1 passed, 0 failed, 2 skipped)"),
        ({"ranks": CUT}, f"CUT OFF (ranks {CUT}, 1 passed, 0 failed, 2 skipped)"),
        (
            {"ranks": "passed", "waits": "failed after 9 s"},
            "FAILED (waits failed after 9 s, 2 passed, 1 failed, 3 skipped)",
        ),
        ({"absent": "passed"}, "FAILED (absent no outcomes, 0 passed, 0 failed, 0 skipped)"),
    ],
)
def test_a_run_is_recorded_with_how_its_parts_ended(record, ends, said):
    run, words = record(**ends)
    assert words == f"gpus1: {said}"
    assert run["failures"] == ["waits::test_bad"] * ("waits" in ends)


def test_a_run_proves_nothing_of_changed_sources(record, tmp_path, capsys):
    run, _ = record(ranks="passed")
    assert run["skips"] == {"no NVLink": 1, "passes": 1}
    assert evidence.state(run, run["sources_sha256"]) == "proven"
    assert evidence.state(run, "others").startswith("unproven")
    assert evidence.check(tmp_path)
    record(ranks="passed", waits="failed after 9 s")
    assert evidence.state(run | {"ok": False}, run["sources_sha256"]) == "failed"
    assert not evidence.check(tmp_path)
    assert "::test_bad\n" in capsys.readouterr().out


def test_the_hash_sees_the_sources_and_not_the_rest(tmp_path):
    for name in ("mpishare/a.py", "tests/gpu/test_b.py", "tests/gpu/gpus1.json", "README.md"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    before = evidence.sources_sha256(tmp_path)
    (tmp_path / "README.md").write_text("changed")
    (tmp_path / "tests/gpu/gpus1.json").write_text("changed")
    (tmp_path / "mpishare/a.pyc").write_text("made")
    assert evidence.sources_sha256(tmp_path) == before
    (tmp_path / "mpishare/a.py").rename(tmp_path / "mpishare/c.py")
    moved = evidence.sources_sha256(tmp_path)
    (tmp_path / "mpishare/c.py").write_text("changed")
    assert len({before, moved, evidence.sources_sha256(tmp_path)}) == 3

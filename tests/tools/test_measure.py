"""The script that measures the pages' figures: its runs are such, and it knows which are old."""

import importlib.util
import json
import shutil
import subprocess
import sys

import pytest

from benchmarks import catalog
from mpishare.bench.options import parse
from tests.helpers.launch import ROOT, run_ranks

spec = importlib.util.spec_from_file_location("measure", ROOT / "scripts/lib/measure.py")
measure = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = measure  # where its dataclass looks for the module
spec.loader.exec_module(measure)

BENCH = [name for name, run in measure.RUNS.items() if run.is_bench]


@pytest.mark.parametrize("name", BENCH)
def test_the_bench_knows_the_cases_and_baselines_of_a_run(name: str) -> None:
    catalog.extend()
    words = measure.RUNS[name].words.split()[2:]
    assert parse(words).cases


@pytest.mark.parametrize(
    "words", sorted({run.words for run in measure.RUNS.values() if "--json" in run.words})
)
def test_a_program_knows_the_words_of_a_run(words: str) -> None:
    program, *options = words.split()
    done = run_ranks(1, ROOT / program, args=[*options, "--help"])
    assert done.returncode == 0, done.describe()


def test_every_run_measures_files_that_are_there() -> None:
    for run in measure.RUNS.values():
        for place in run.measured:
            assert (ROOT / place.removeprefix(":(exclude)")).exists(), place


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("plans/exchange/host/a.py", "cpu32-mpich-ranks8"),
        ("plans/exchange/cuda/b.cu", "gpus2"),
        ("rows/c.py", None),
    ],
)
def test_a_run_is_old_once_a_file_that_it_measures_has_changed(tmp_path, file, name) -> None:
    path = tmp_path / "mpishare" / file
    path.parent.mkdir(parents=True)
    revisions = []
    for text in ("1\n", "2\n"):
        path.write_text(text)
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "a change"]):
            subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
        revisions.append(measure.git("rev-parse", "HEAD", root=tmp_path))
    for each in ("cpu32-mpich-ranks8", "gpus2"):
        found = measure.newer(measure.RUNS[each], revisions[0], tmp_path)
        assert found == ([f"mpishare/{file}"] if each == name else [])
    assert measure.newer(measure.RUNS["gpus2"], "0" * 40, tmp_path) == ["all of it"]


def test_a_run_that_is_not_there_or_was_interrupted_is_missing(tmp_path, capsys) -> None:
    assert measure.revision_of(tmp_path, "gpus2") is None
    header = {"git_revision": "ab", "interrupted": "ring"}
    (tmp_path / "gpus2.json").write_text(json.dumps({"header": header, "rows": []}))
    (tmp_path / "steps.jsonl").write_text('{"run": "steps-gpus2-pinned", "revision": "cd"}\n')
    assert measure.revision_of(tmp_path, "gpus2") is None
    assert measure.revision_of(tmp_path, "steps-gpus2-pinned") == "cd"
    assert measure.revision_of(tmp_path, "steps-gpus2-mpishare") is None
    assert measure.tell(["gpus2"], tmp_path)
    assert capsys.readouterr().out == "gpus2: missing\n"

"""The tables of figures are what docs/results gives, and are made as they say."""

import importlib.util
import json
import sys

import pytest

from mpishare.bench.report import as_json
from tests.helpers.launch import ROOT

TABLES = ROOT / "benchmarks" / "tables"
sys.path.insert(0, str(TABLES))  # where it imports from, started as a program
spec = importlib.util.spec_from_file_location("results", TABLES / "results.py")
results = importlib.util.module_from_spec(spec)
spec.loader.exec_module(results)

PERFORMANCE = "docs/performance.md"


def page_of(name: str) -> str:
    marks = "\n\n".join(
        f"<!-- results: {mark} -->\nold\n{results.END}" for mark in results.PAGES[name]
    )
    return f"# title\n\n{marks}\n\n## end\n"


@pytest.fixture
def folder(tmp_path):
    """A place with the pages, and docs/results with no run in it."""
    made = tmp_path / "docs" / "results"
    made.mkdir(parents=True)
    (tmp_path / "docs/figures").mkdir()
    for page in results.PAGES:
        (tmp_path / page).write_text(page_of(page))
    return made


def test_the_pages_are_what_the_runs_give(capsys):
    assert results.main(["--check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("mine", lambda run: None, "known are gpus4"),
        ("gpus4", lambda run: run.pop("rows"), "not the JSON of a run"),
        ("gpus4", lambda run: run["rows"][0].update(wrong=True), "a wrong result"),
        ("gpus4", lambda run: run["header"]["options"].update(check=False), "checked nothing"),
        ("redistribute-gpus4", lambda run: run["header"].update(interrupted="ring"), "interrupted"),
        ("gpus4", lambda run: run["header"].update(git_revision="01-dirty"), "with changes"),
        ("gpus4", lambda run: run["header"].update(git_revision=None), "no revision"),
    ],
)
def test_what_cannot_be_quoted_is_refused(folder, capsys, name, change, words):
    run = json.loads((ROOT / "docs/results/gpus4.json").read_text())
    change(run)
    (folder / f"{name}.json").write_text(json.dumps(run))
    assert results.main([], folder.parents[1]) == 1
    assert words in capsys.readouterr().err
    assert (folder.parents[1] / "docs/performance.md").read_text() == page_of(PERFORMANCE)


@pytest.mark.parametrize("file", sorted((ROOT / "docs" / "results").glob("*.json")))
def test_a_quoted_run_has_a_line_per_row(file):
    run = json.loads(file.read_text())
    assert as_json(run["header"], run["rows"]) == file.read_text()

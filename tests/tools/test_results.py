"""The tables of figures are what docs/results gives, and are made as they say."""

import copy
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

HEADER = {
    "date": "2026-01-02T03:04:05+00:00",
    "ranks": 4,
    "cores": 2,
    "gpus": [],
    "driver": None,
    "mpi_library": "MPICH Version:      5.0",
    "versions": {"mpishare": "0.1", "cupy": None},
    "git_revision": "0123456789abcdef",
    "command": "mpirun -n 4 python -m mpishare.bench ring",
    "options": {"check": True},
}
PERFORMANCE, RESULTS, JAX = "docs/performance.md", "docs/results/README.md", "docs/jax.md"
FIGURES = (PERFORMANCE, RESULTS)  # the pages that have all runs


def page_of(name: str) -> str:
    marks = "\n\n".join(
        f"<!-- results: {mark} -->\nold\n{results.END}" for mark in results.PAGES[name]
    )
    return f"# title\n\n{marks}\n\n## end\n"


def made(folder, page: str) -> list[str]:
    """The lines between all marks of a page."""
    return [line for lines in results.PAGES[page].values() for line in lines(folder)]


def row(arm: str, kind: str, clock: str, median_us: float | None, nbytes: int = 8, **more) -> dict:
    ok = median_us is not None
    found = {"case": "halo1d", "arm": arm, "kind": kind, "clock": clock, "median_us": median_us}
    return {**found, "nbytes": nbytes, "ok": ok, "wrong": False, "reason": None, **more}


def a_run() -> dict:
    rows = []
    for clock, factor in (("latency", 1.0), ("throughput", 0.5)):
        rows += [
            row("slow", "own", clock, 9.0 * factor),
            row("fast", "own", clock, 2.0 * factor),
            row("staged", "rival", clock, 8.0),
            row("nccl", "rival", clock, None, reason="NCCL: two ranks on one GPU"),
            row("copy engine", "ceiling", clock, 0.1),
        ]
    return {"header": copy.deepcopy(HEADER), "rows": rows}


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


def test_a_table_is_made_and_stays(folder, capsys):
    (folder / "cpu-mpich.json").write_text(json.dumps(a_run()))
    root = folder.parents[1]
    assert results.main(["--check"], root) == 1
    assert "+**No GPU, MPICH**: 4 ranks on 2 CPU cores" in capsys.readouterr().out
    assert results.main([], root) == 0
    assert results.main(["--check"], root) == 0
    for page in FIGURES:
        text = (root / page).read_text()
        assert text.startswith("# title\n")
        assert text.endswith("\n\n## end\n")
        assert "old" not in text
        lines = text.splitlines()
        # The fastest arm of mpishare on each clock, over the rival's of the same run.
        assert "| 8 B | 2 / 1 | 0.25 / 0.12 |" in lines
        assert any("2026-01-02, revision 0123456789ab." in line for line in lines)
        assert any("4 ranks on 2 CPU cores" in line for line in lines)
        assert "copy engine" not in text
    assert "- nccl did not run: NCCL: two ranks on one GPU" in lines
    assert "$ mpirun -n 4 python -m mpishare.bench ring" in lines
    assert any("MPICH Version: 5.0" in line for line in lines)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("mine", lambda run: None, "known are gpus4"),
        ("gpus4", lambda run: run.pop("rows"), "not the JSON of a run"),
        ("gpus4", lambda run: run["rows"][0].update(wrong=True), "a wrong result"),
        ("gpus4", lambda run: run["header"]["options"].update(check=False), "checked nothing"),
        ("gpus4", lambda run: run["header"].update(interrupted="ring"), "was interrupted"),
        ("gpus4", lambda run: run["header"].update(git_revision="01-dirty"), "with changes"),
        ("gpus4", lambda run: run["header"].update(git_revision=None), "no revision"),
        ("gpus4", lambda run: run["rows"].__delitem__(slice(0, 2)), "mpishare has no time"),
    ],
)
def test_what_cannot_be_quoted_is_refused(folder, capsys, name, change, words):
    run = a_run()
    change(run)
    (folder / f"{name}.json").write_text(json.dumps(run))
    assert results.main([], folder.parents[1]) == 1
    assert words in capsys.readouterr().err
    assert (folder.parents[1] / "docs/performance.md").read_text() == page_of(PERFORMANCE)


@pytest.mark.parametrize("page", results.PAGES)
@pytest.mark.parametrize("mark", ["end -->", "{} -->"])
def test_a_page_without_a_mark_of_each_table_is_refused(folder, capsys, page, mark):
    file = folder.parents[1] / page
    name = next(iter(results.PAGES[page]))
    file.write_text(file.read_text().replace(mark.format(name), "other -->", 1))
    assert results.main([], folder.parents[1]) == 1
    assert f"{page} wants " in capsys.readouterr().err


def test_an_application_that_was_wrong_is_refused(folder, capsys):
    (folder / "applications.jsonl").write_text(json.dumps({"checked": False}))
    assert results.main([], folder.parents[1]) == 1
    assert "a wrong result" in capsys.readouterr().err


@pytest.mark.parametrize("file", sorted((ROOT / "docs" / "results").glob("*.json")))
def test_a_quoted_run_has_a_line_per_row(file):
    run = json.loads(file.read_text())
    assert as_json(run["header"], run["rows"]) == file.read_text()


def test_the_columns_of_mpi4jax_stand_where_it_ran(folder):
    run = a_run()
    run["rows"] = [
        row(arm, kind, "throughput", us, case="jax")
        for form in results.others.FORMS
        for arm, kind, us in (
            (form, "own", 6.0),
            (f"{form} alone", "rival", 2.0),
            (f"mpi4jax, {form}", "rival", 24.0),
            ("exchange called", "rival", 4.0),
        )
    ]
    (folder / "jax-gpus2.json").write_text(json.dumps(run))
    assert "| 8 B | padded | 6 | 2 | 4 | 24 | 0.25 | 4 |" in made(folder, JAX)


@pytest.mark.parametrize("ranks", [8, 28])
def test_redistributions_without_a_gpu_have_a_section_once_they_are_there(folder, ranks):
    run = a_run()
    times = {("private", "own"): 2.0, ("windows", "own"): 4.0, ("allgather", "rival"): 8.0}
    run["rows"] = [
        row(arm, kind, clock, us, case="allgather", n=None)
        for (arm, kind), us in times.items()
        for clock in ("latency", "throughput")
    ]
    (folder / f"redistribute-host-ranks{ranks}.json").write_text(json.dumps(run))
    lines = made(folder, PERFORMANCE)
    assert any(line.startswith(f"**No GPU, {ranks} ranks**: ") for line in lines)
    assert "| 8 B | 2 / 2 | 4 / 4 | 8 / 8 | 0.25 / 0.25 |" in lines

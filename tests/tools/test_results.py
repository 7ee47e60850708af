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
tables = sys.modules["tables"]

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
APPLICATIONS = "applications.jsonl"


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


def test_performance_has_the_first_case_alone(folder):
    run = a_run()
    run["rows"] += [each | {"case": "ring"} for each in run["rows"]]
    (folder / "cpu-mpich.json").write_text(json.dumps(run))
    assert results.main([], folder.parents[1]) == 0
    pages = [(folder.parents[1] / page).read_text() for page in FIGURES]
    assert ["| two faces, in a ring |" in page for page in pages] == [False, True]
    assert ["| 1-D halo |" in page for page in pages] == [True, True]


def test_the_newest_libraries_stand_in_their_fastest_form(folder):
    run = a_run()
    run["rows"] = []
    for clock, factor in (("latency", 1.0), ("throughput", 0.5)):
        times = {"window fields": 4.0, "private fields": 5.0, "nccl": 9.0, "nccl graph": 8.0}
        times |= {"torch": 6.0, "torch in place": 2.0}
        kinds = {arm: "own" if "fields" in arm else "rival" for arm in times}
        run["rows"] += [row(arm, kinds[arm], clock, us * factor) for arm, us in times.items()]
        run["rows"].append(row("nccl put", "rival", clock, None, reason="NCCL put: too old"))
    (folder / "newest-gpus2.json").write_text(json.dumps(run))
    lines = made(folder, PERFORMANCE)
    (heads,) = (line for line in lines if line.startswith("| 1-D halo"))
    assert "| mpishare | NCCL send and receive | PyTorch symmetric memory |" in heads
    assert "| 8 B | 4 / 2 | 8 / 4 | 2 / 1 | 2.00 / 2.00 |" in lines
    assert "- NCCL put and signal was not timed: too old" in lines


def test_what_was_not_timed_is_a_line_per_library_and_reason(folder):
    run = a_run()
    why = "torch symmetric memory: not for float64"
    more = {"case": "allreduce", "ok": False}
    run["rows"] = [
        row(arm, "rival", clock, None, nbytes=nbytes, **found)
        for nbytes in (1 << 16, 1 << 20)
        for clock in tables.CLOCKS
        for arm, found in (
            ("nvshmem", {"wrong": True, "reason": f"words not right: {nbytes} on rank 0"}),
            ("nvshmem graph", {"wrong": True, "reason": f"words not right: {nbytes} on rank 1"}),
            ("torch", {"reason": why}),
            ("torch graph", {"reason": why}),
        )
        for found in [{**more, **found}]
    ]
    (folder / "newest-gpus2.json").write_text(json.dumps(run))
    assert [line for line in made(folder, PERFORMANCE) if line.startswith("- ")] == [
        "- NVSHMEM gave wrong sums of 64 KiB, 1 MiB, and was not timed there",
        "- PyTorch symmetric memory was not timed in sums: not for float64",
    ]


def test_redistributions_have_a_column_per_form(folder):
    run = a_run()
    run["rows"] = []
    for clock, factor in (("latency", 1.0), ("throughput", 0.5)):
        times = {"private": 6.0, "windows": 3.0, "alltoallw": 12.0, "isend": 24.0}
        for case, n in (("redistribute", 64), ("allgather", None)):
            for arm, us in times.items():
                kind = "own" if arm in ("private", "windows") else "rival"
                run["rows"].append(row(arm, kind, clock, us * factor) | {"case": case, "n": n})
    absent = row("nccl", "rival", "latency", None, reason="NCCL: ranks share a GPU")
    run["rows"].append(absent | {"case": "redistribute", "n": 64})
    (folder / "redistribute-onegpu-ranks4-mps.json").write_text(json.dumps(run))
    lines = made(folder, PERFORMANCE)
    heads = [
        line for line in lines if "| mpishare, private | mpishare, windows | alltoallw" in line
    ]
    assert len(heads) == 2
    assert "| 8 B, n = 64 | 6 / 3 | 3 / 1.5 | 12 / 6 | 24 / 12 | 0.25 / 0.25 |" in lines
    assert "| 8 B | 6 / 3 | 3 / 1.5 | 12 / 6 | 24 / 12 | 0.25 / 0.25 |" in lines
    assert "- NCCL send and receive was not timed: ranks share a GPU" in lines


def test_sums_stand_by_the_way_they_are_called(folder):
    run = a_run()
    times = {"reduce": 4.0, "reduce graph": 3.0, "reduce graph of 20": 2.0, "complex128": 4.5}
    times |= {"nccl": 12.0, "nccl graph": 9.0, "nccl graph of 20": 5.0, "nccl4py graph of 20": 4.0}
    times |= {"nccl4py": 16.0, "staged": 10.0}
    more = {"case": "allreduce"}
    run["rows"] = [row(arm, "own", "latency", 99.0, **more) for arm in times]
    run["rows"] += [row(arm, "own", "throughput", us, **more) for arm, us in times.items()]
    run["rows"].append(row("float", "rival", "throughput", None, **more, reason="no"))
    (folder / "newest-gpus2.json").write_text(json.dumps(run))
    lines = made(folder, PERFORMANCE)
    begin = "| 8 B | 4 / 3 / 2 | 12 / 9 / 5 | 16 / 4 | 10 |"
    assert f"{begin} 0.40 / 0.33 / 0.50 | 4.5 |" in lines


def test_solves_are_compared_with_their_kernels_and_with_the_calls_of_nccl(folder):
    run = a_run()
    times = {"kernels": 50.0, "one graph": 60.0, "nccl": 150.0, "nccl beside": 120.0}
    more = {"case": "cg"}
    run["rows"] = [row(arm, "own", "throughput", us, **more) for arm, us in times.items()]
    (folder / "newest-gpus2.json").write_text(json.dumps(run))
    assert results.main([], folder.parents[1]) == 0
    lines = (folder.parents[1] / "docs/solvers.md").read_text().splitlines()
    assert "| mpishare, one graph per solve | 60 | 1.20 | 0.50 |" in lines
    assert "| NCCL, kernel by kernel | 150 | 3.00 | 1.25 |" in lines
    assert any("revision 0123456789ab." in line for line in lines)


def test_what_is_made_and_a_dot_product_have_their_times(folder):
    run = a_run()
    run["rows"] = [row("second plan", "own", "latency", 456.0, case="setup")]
    times = {"dot": 7.0, "dot of one rank": 6.5, "local dot": 40.0, "vdot and allreduce": 50.0}
    run["rows"] += [row(arm, "own", "throughput", us, case="dot") for arm, us in times.items()]
    (folder / "newest-gpus2.json").write_text(json.dumps(run))
    lines = made(folder, PERFORMANCE)
    assert "| second plan | 0.456 |" in lines
    assert any("back to back: 7 µs, of one rank 6.5;" in line for line in lines)
    assert any("own 40, and with `MPI_Allreduce` behind it 50." in line for line in lines)


def test_a_size_that_was_left_out_is_one_line(folder):
    run = a_run()
    text = "64 MiB left out: 370.2 GiB of memory are needed on a GPU and 139.3 GiB available"
    run["header"]["left_out"] = {"halo1d": [text]}
    run["rows"].append(row("naive", "rival", "latency", None, reason="not here"))
    (folder / "gpus2.json").write_text(json.dumps(run))
    lines = made(folder, RESULTS)
    assert f"- 1-D halo: {text}" in lines
    assert lines.count("- naive did not run: not here") == 1


@pytest.mark.parametrize("file", sorted((ROOT / "docs" / "results").glob("*.json")))
def test_a_quoted_run_has_a_line_per_row(file):
    rows = [line for line in file.read_text().splitlines() if line.startswith('  {"case": ')]
    assert [json.loads(line.rstrip(",")) for line in rows] == tables.read(file, is_whole=False)[
        "rows"
    ]


def test_without_runs_there_is_no_section(folder):
    assert made(folder, PERFORMANCE) == made(folder, RESULTS) == []


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
def test_a_page_without_marks_is_refused(folder, capsys, page):
    (folder.parents[1] / page).write_text("# title\n")
    assert results.main([], folder.parents[1]) == 1
    assert f"{page} wants {len(results.PAGES[page])} <!-- results: end" in capsys.readouterr().err


def test_a_mark_of_another_name_is_refused(folder, capsys):
    page = folder.parents[1] / JAX
    page.write_text(page.read_text().replace("results: jax", "results: jaxes"))
    assert results.main([], folder.parents[1]) == 1
    assert f"{JAX} wants one <!-- results: jax -->" in capsys.readouterr().err


APPLICATION = {
    "program": "heat3d",
    "gpu": "NVIDIA H200",
    "date": "2026-01-02T03:04:05+00:00",
    "ranks": 4,
    "graph": True,
    "wrap": False,
    "dims": [2, 2, 1],
    "cells": [64, 64, 64],
    "step_us_median": 50.0,
    "exchange_us_median": 10.04,
    "checked": None,
}


def test_what_examples_print_is_a_line_each(folder):
    (folder / "cpu-mpich.json").write_text(json.dumps(a_run()))
    orders = {"plain_us": 40.0, "last_us": 30.0, "plain_efficiency": 0.5, "last_efficiency": 0.75}
    lines = [APPLICATION, APPLICATION | orders | {"pinned_exchange_to_mpishare": 15.71}]
    (folder / APPLICATIONS).write_text("".join(json.dumps(each) + "\n" for each in lines))
    text = made(folder, RESULTS)
    begin = "| heat3d --graph | 128 x 128 x 64 | 4 on NVIDIA H200, 2026-01-02 |"
    assert f"{begin} 50 |  |  | 10 |  |  |  |" in text
    assert f"{begin} 30 (last) |  | 0.75 | 10 |  | 15.7 |  |" in text


def test_a_step_on_cpus_stands_beside_the_fastest_of_mpi(folder):
    (folder / "cpu-mpich.json").write_text(json.dumps(a_run()))
    found = APPLICATION | {
        "gpu": None,
        "graph": False,
        "mpi": "MPICH",
        "step_to_fastest_mpi": 0.954,
    }
    (folder / APPLICATIONS).write_text(json.dumps(found) + "\n")
    begin = "| heat3d | 128 x 128 x 64 | 4 on CPU cores (MPICH), 2026-01-02 |"
    assert f"{begin} 50 |  |  | 10 | 0.95 |  |  |" in made(folder, RESULTS)


def cores_run(mpi: str, ranks: int, factor: float) -> dict:
    """A run with a core per rank: faces of 8 bytes along one axis, of 66248 bytes along three."""
    run = a_run()
    run["header"] |= {"ranks": ranks, "cores": ranks, "cores_per_rank": 1}
    run["header"] |= {"cores_of_machine": 32, "cpu": "Xeon(R)"}
    run["header"]["mpi_library"] = mpi
    times = {"window fields": 5.0, "private fields": 6.0, "fresh fields": 8.0}
    rivals = {"sendrecv": 16.0, "isend": 10.0, "sendrecv fresh": 20.0}
    rows = [
        row(arm, kind, clock, us * (factor if kind == "own" else 1.0), nbytes=nbytes, case=case)
        for case, nbytes in (("halo1d", 8), ("halo3d", 66248))
        for clock in ("latency", "throughput")
        for kind, found in (("own", times), ("rival", rivals))
        for arm, us in found.items()
    ]
    rows += [
        row(arm, kind, "throughput", us, nbytes=0, case="fence")
        for arm, kind, us in (
            ("fence", "own", 3.0),
            ("node.barrier", "own", 5.0),
            ("barrier", "rival", 4.0),
        )
    ]
    run["rows"] = rows
    return run


def test_runs_with_a_core_per_rank_stand_side_by_side(folder):
    for name, mpi, ranks, factor in (
        ("cpu32-mpich-ranks8", "MPICH Version: 5", 8, 1.0),
        ("cpu32-mpich-ranks28", "MPICH Version: 5", 28, 4.0),
        ("cpu32-openmpi-ranks32", "Open MPI v5", 32, 2.0),
    ):
        (folder / f"{name}.json").write_text(json.dumps(cores_run(mpi, ranks, factor)))
    root = folder.parents[1]
    assert results.main([], root) == 0
    lines = (root / "README.md").read_text().splitlines()
    assert "| faces | MPICH, 8 ranks | Open MPI, 32 ranks |" in lines
    # In windows and private over the fastest, fresh over Sendrecv of fresh ones.
    assert "| 8 B, 1-D | 0.50 / 0.60 / 0.40 | 1.00 / 1.20 / 0.80 |" in lines
    assert "| 64 KiB, 3-D | 0.50 / 0.60 / 0.40 | 1.00 / 1.20 / 0.80 |" in lines
    assert any("32 cores (Xeon), each rank bound to one; 2026-01-02" in line for line in lines)
    lines = (root / "docs/performance.md").read_text().splitlines()
    assert "| 8 B | private | 6 (0.60) | 24 (2.40) | 12 (1.20) |" in lines
    assert "| 64.7 KiB | fresh | 8 (0.40) | 32 (1.60) | 16 (0.80) |" in lines
    assert "| `Window.fence` | 3 (0.75) | 3 (0.75) | 3 (0.75) |" in lines
    assert "| `Node.barrier` | 5 (1.25) | 5 (1.25) | 5 (1.25) |" in lines
    text = (root / "docs/results/README.md").read_text()
    assert "## No GPU, 32 cores, 28 ranks, MPICH" in text
    assert "| 8 B | fresh | 32 / 32 |" in text
    assert "28 ranks on 28 of 32 CPU cores (Xeon), each bound to one; 2026-01-02" in text
    assert "a plot" not in text


def test_a_size_that_one_of_several_runs_lacks_is_a_dash(folder):
    whole, part = cores_run("MPICH", 8, 1.0), cores_run("Open MPI", 8, 1.0)
    part["rows"] = [each for each in part["rows"] if each["case"] != "halo3d"]
    (folder / "cpu32-mpich-ranks8.json").write_text(json.dumps(whole))
    (folder / "cpu32-openmpi-ranks8.json").write_text(json.dumps(part))
    assert results.main([], folder.parents[1]) == 0
    text = (folder.parents[1] / "README.md").read_text()
    assert "| 64 KiB, 3-D | 0.50 / 0.60 / 0.40 | - / - / - |" in text


def test_an_example_that_was_wrong_is_refused(folder, capsys):
    (folder / "cpu-mpich.json").write_text(json.dumps(a_run()))
    (folder / APPLICATIONS).write_text(json.dumps(APPLICATION | {"checked": False}))
    assert results.main([], folder.parents[1]) == 1
    assert "a wrong result" in capsys.readouterr().err


@pytest.mark.parametrize("rows", [[], [{"case": "ring", "median_us": None}, {"case": "fence"}]])
@pytest.mark.parametrize("header", [{}, {"date": "2026-01-01", "gpus": [{"name": "X"}]}])
def test_a_run_is_json_with_a_line_per_row(header, rows):
    text = as_json(header, rows)
    assert json.loads(text) == {"header": header, "rows": rows}
    lines = text.splitlines()[-len(rows) - 2 : -2]
    assert [json.loads(line.strip().rstrip(",")) for line in lines] == rows


@pytest.mark.parametrize("file", sorted((ROOT / "docs" / "results").glob("*.json")))
def test_quoted_runs_are_written_like_that(file):
    run = json.loads(file.read_text())
    assert as_json(run["header"], run["rows"]) == file.read_text()


def test_steps_of_jax_stand_beside_the_same_without_the_exchange(folder):
    run = a_run()
    times = {
        "loop": 50.0,
        "recorded": 13.0,
        "recorded alone": 5.0,
        "unrolled": 12.0,
        "padded": 6.0,
        "loop alone": 15.0,
    }
    times |= {"unrolled alone": 3.0, "padded alone": 2.0, "exchange called": 4.0}
    run["rows"] = [row(arm, "own", "throughput", us, case="jax") for arm, us in times.items()]
    (folder / "jax-gpus2.json").write_text(json.dumps(run))
    lines = made(folder, JAX)
    assert "| 8 B | unrolled | 12 | 3 | 9 | 4 |" in lines
    run["rows"] += [
        row(arm, "rival", "throughput", 24.0, case="jax")
        for arm in (f"mpi4jax, {form}" for form in results.others.FORMS)
    ]
    (folder / "jax-gpus2.json").write_text(json.dumps(run))
    assert "| 8 B | padded | 6 | 2 | 4 | 24 | 0.25 | 4 |" in made(folder, JAX)


def test_new_arrays_stand_beside_kept_ones_and_messages(folder):
    run = a_run()
    times = {"new arrays": 10.0, "kept, copied": 8.0, "arrays in turn": 6.0, "kept array": 5.0}
    times["staged"] = 40.0
    run["rows"] = [
        row(arm, "own", clock, us * factor, case="fresh")
        for arm, us in times.items()
        for clock, factor in (("latency", 2.0), ("throughput", 1.0))
    ]
    (folder / "fresh-gpus2.json").write_text(json.dumps(run))
    expected = "| 8 B | 20 / 10 | 1.25 / 1.25 | 0.25 / 0.25 | 12 / 6 | 1.20 / 1.20 |"
    assert expected in made(folder, RESULTS)


def test_messages_stand_beside_those_by_hand_and_through_the_host(folder):
    run = a_run()
    times = {"messages": 20.0, "mpi": 16.0, "mpi packed": 40.0, "through the host": 200.0}
    run["rows"] = [
        row(arm, "own", clock, us * factor, case=case)
        for case in results.halos.MESSAGES
        for arm, us in times.items()
        if (case, arm) != ("messages3d", "mpi packed")
        for clock, factor in (("latency", 1.0), ("throughput", 0.5))
    ]
    (folder / "messages-gpus2.json").write_text(json.dumps(run))
    mixed = {"face_nbytes": 8, "fused": [4, 2], "messages": [9, 8], "mixed": [10, 9]}
    mixed |= {"fused part alone": 3, "fused part of mixed": 5, "interior": 15}
    mixed |= {"interior beside mixed": 16}
    sums = {"sum_nbytes": 1024, "on GPUs": 100, "through the host": 50, "staged by hand": 30}
    (folder / "mixed-gpus2.jsonl").write_text(f"{json.dumps(mixed)}\n{json.dumps(sums)}\n")
    lines = made(folder, PERFORMANCE)
    times = "| 8 B | 20 / 10 | 16 / 8 | 40 / 20 | 200 / 100 "
    assert f"{times}| 1.25 / 1.25 | 0.50 / 0.50 | 0.10 / 0.10 |" in lines
    assert "| 8 B | 20 / 10 | 16 / 8 | 200 / 100 | 1.25 / 1.25 | 0.10 / 0.10 |" in lines
    assert "| 8 B | 4 / 2 | 9 / 8 | 10 / 9 | 5 | 3 | 15 | 16 |" in lines
    assert "| 1 KiB | 100 | 50 | 30 |" in lines

"""Two runs side by side, and the files that a run leaves: no MPI, no GPU."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

from mpishare.bench import cli
from mpishare.bench.options import Options
from mpishare.bench.report.compare import main
from mpishare.bench.report.plot import draw
from mpishare.bench.report.render import render
from mpishare.bench.report.rows import Row
from tests.bench.test_measure import HEADER

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)


def rows(times_us: dict[str, float | None]) -> list[Row]:
    """A ring of two sizes; an arm without a time did not run."""
    found = []
    for nbytes in (8, 1 << 20):
        for arm, time_us in times_us.items():
            for clock in ("latency", "throughput"):
                row = Row("ring", arm, "host", 4, nbytes, clock)
                row.kind = "own" if arm == "fused" else "rival"
                if time_us is None:
                    row.fail("it is not installed", wrong=False)
                else:
                    row.fill([time_us * 1e-6], 16)
                found.append(row)
    return found


def write(file: Path, times_us: dict[str, float | None]) -> str:
    file.write_text(render("json", HEADER, rows(times_us)))
    return str(file)


def test_medians_and_their_ratio(tmp_path: Path, capsys) -> None:
    a = write(tmp_path / "a.json", {"fused": 4.0, "nccl": 8.0, "gone": 1.0})
    b = write(tmp_path / "b.json", {"fused": 3.0, "nccl": None, "new": 1.0})
    assert main([a, b]) == 0
    shown = capsys.readouterr().out
    assert f"a: {a}: n7, 4 ranks, 2026-01-02" in shown
    lines = [line.split() for line in shown.splitlines()]
    assert ["ring", "8", "B", "fused", "latency", "4.00", "3.00", "0.75"] in lines
    assert ["ring", "1", "MiB", "fused", "latency", "4.00", "3.00", "0.75"] in lines
    assert ["nccl", "back", "to", "back", "8.00", "not", "run"] in lines
    assert "in a alone: 4 of 12 rows" in shown
    assert "in b alone: 4 of 12 rows" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file"),
        ("not json", "not the JSON of a run"),
        ("[]", "not the JSON of a run"),
        ('{"header": {}}', "not the JSON of a run"),
        ('{"header": {}, "rows": [1]}', "not the JSON of a run"),
        ('{"header": {}, "rows": [{"case": "ring"}]}', "not the JSON of a run"),
        ('{"header": {}, "rows": []}', "in common"),
    ],
)
def test_what_is_no_run_is_status_2_and_one_line(
    tmp_path: Path, capsys, text: str | None, words: str
) -> None:
    a, b = write(tmp_path / "a.json", {"fused": 1.0}), tmp_path / "b.json"
    if text is not None:
        b.write_text(text)
    assert main([a, str(b)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert words in shown.err
    assert "b.json" in shown.err


@pytest.mark.parametrize("words", [[], ["a.json"], ["a", "b", "c"], ["--nosuch"]])
def test_wrong_words_are_status_2(words: list[str], capsys) -> None:
    assert cli.main(["compare", *words]) == 2
    assert "compare:" in capsys.readouterr().err


def test_a_file_of_another_revision_may_have_more_keys(tmp_path: Path, capsys) -> None:
    a = Path(write(tmp_path / "a.json", {"fused": 1.0}))
    run = json.loads(a.read_text())
    for row in run["rows"]:
        row["future"] = 1
    a.write_text(json.dumps(run))
    assert main([str(a), str(a)]) == 0
    assert "1.00" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "name", "shown", "filed"),
    [
        ("table", "run.json", "", "{"),  # the tables are shown as the cases end
        ("json", "run.json", "", "{"),
        ("json", "run.csv", "{", "case,"),
        ("csv", "run.csv", "", "case,"),
        ("table", "run.txt", "", "mpishare bench"),
        ("json", "run.txt", "", "{"),
    ],
)
def test_where_a_report_goes(tmp_path, capsys, kind, name, shown, filed) -> None:
    options = Options(format=kind, output=str(tmp_path / name))
    cli._write(options, HEADER, rows({"fused": 1.0}))
    out = capsys.readouterr().out
    assert out.startswith(shown) if shown else out == ""
    assert (tmp_path / name).read_text().startswith(filed)


@needs_matplotlib
def test_a_plot_has_mpishare_staged_and_the_fastest_and_is_the_same_again(tmp_path: Path) -> None:
    found = rows({"fused": 4.0, "staged": 8.0, "mpi": 6.0, "nccl": None})
    files = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for file in files:
        draw(file, HEADER, found)
    texts = [file.read_text() for file in files]
    assert texts[0] == texts[1]
    for word in ("mpishare, fused", "staged", "fastest baseline", "1 MiB", "GB/s"):
        assert texts[0].count(f"<!-- {word}") == (2 if word == "1 MiB" else 1), word
    assert "<!-- mpishare bench: 4 ranks on 2 cores, back to back, 2026-01-02" in texts[0]
    assert "nccl" not in texts[0]


@needs_matplotlib
def test_a_plot_of_one_size_says_so(tmp_path: Path) -> None:
    draw(tmp_path / "a.svg", HEADER, rows({"fused": 1.0})[:2])
    assert "no case ran at several sizes" in (tmp_path / "a.svg").read_text()


@needs_matplotlib
def test_a_case_that_has_no_sizes_is_not_drawn(tmp_path: Path) -> None:
    """The rows of ``setup`` have bytes too: those of its plans."""
    others = [replace(row, case="setup") for row in rows({"plan": 1.0})]
    draw(tmp_path / "a.svg", HEADER, [*rows({"fused": 1.0}), *others])
    assert "<!-- plan" not in (tmp_path / "a.svg").read_text()


@needs_matplotlib
def test_a_plot_of_an_unknown_kind_is_refused_before_the_run() -> None:
    said = cli._problem(Options(plot="a.xyz"))
    assert said == "--plot: 'a.xyz' must end in .svg, .png, .pdf"


def test_a_plot_without_matplotlib_is_refused_before_the_run(monkeypatch) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    assert "matplotlib is not installed" in str(cli._problem(Options(plot="a.svg")))
    assert cli._problem(Options()) is None

"""Two runs side by side: no MPI, no GPU."""

from pathlib import Path

import pytest

from benchmarks.__main__ import main as run
from benchmarks.compare import main
from tests.bench.test_report import write


def test_medians_and_their_ratio(tmp_path: Path, capsys) -> None:
    a = write(tmp_path / "a.json", {"fused": 4.0, "nccl": 8.0, "gone": 1.0})
    b = write(tmp_path / "b.json", {"fused": 3.0, "nccl": None, "new": 1.0})
    assert main([a, b]) == 0
    shown = capsys.readouterr().out
    assert f"a: {a}: n7, 4 ranks, 2026-01-02" in shown
    lines = [line.split() for line in shown.splitlines()]
    assert ["halo1d", "8", "B", "fused", "latency", "4.00", "3.00", "0.75"] in lines
    assert ["halo1d", "1", "MiB", "fused", "latency", "4.00", "3.00", "0.75"] in lines
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
    assert run(["compare", *words]) == 2
    assert "compare:" in capsys.readouterr().err

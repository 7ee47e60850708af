"""Two revisions side by side in one process: exported under names of their own, and timed."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from scripts.lib import compare_revisions as compare
from scripts.lib import in_turns
from tests.helpers.launch import ROOT, run_ranks

SCRIPT = Path(compare.__file__)


@pytest.fixture
def export(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)

    def run(*trees):
        compare.export([str(tree) for tree in trees], tmp_path / "exported")
        return tmp_path / "exported"

    return run


def test_the_ratio_is_the_median_of_those_of_the_rounds(capsys):
    # B is slower by a fifth, whatever the machine did in a round.
    a = [1.0, 1.0, 7.0, 2.0, 3.0]
    in_turns.print_line("fence", {"a": a, "b": [1.2 * each for each in a]}, "the same", digits=3)
    line = "| fence | 2.00 | 2.40 | 1.200 (1.200 to 1.200) | the same |\n"
    assert capsys.readouterr().out == line


def test_the_way_that_begins_a_round_changes():
    order = []
    calls = {way: partial(order.append, way) for way in "ab"}
    times = in_turns.in_turns_us(calls, count=2, turns=3, drain=in_turns.nothing)
    assert "".join(order) == "bbaa" + "aabb" + "bbaa" + "aabb"
    assert [len(each) for each in times.values()] == [3, 3]


def test_what_is_not_the_same_is_told():
    one = [np.array([2.0, 4.0])]
    assert in_turns.compare_bits(one, [np.array([2.0, 4.0])]) == "the same"
    assert in_turns.compare_bits(one, [np.array([2.0, 3.0])]) == "within 0.2 of the largest"


def test_each_operation_runs_and_is_right(export):
    folder = export(ROOT, ROOT)
    args = ["--exported", str(folder), "--seconds", "0.1", "--passes", "1"]
    result = run_ranks(2, SCRIPT, args=args)
    assert result.returncode == 0, result.describe()
    lines = result.stdout.splitlines()[4:]
    assert [line.split(" | ")[0][2:] for line in lines] == [*compare.ORDERED, *compare.BLOCKING]

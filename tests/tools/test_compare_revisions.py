"""Two revisions side by side in one process: exported under names of their own, and timed."""

import argparse
from pathlib import Path

import numpy as np
import pytest

from scripts.lib import compare_revisions as compare
from tests.helpers.launch import ROOT, run_ranks

SCRIPT = Path(compare.__file__)


@pytest.fixture
def export(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)

    def run(*trees):
        compare.export([str(tree) for tree in trees], tmp_path / "exported")
        return tmp_path / "exported"

    return run


def test_the_ratio_is_the_median_of_those_of_the_rounds():
    made = object.__new__(compare.Comparison)
    made.options = argparse.Namespace(backend="host")
    made.comm = argparse.Namespace(size=2)
    # B is slower by a fifth, whatever the machine did in a round.
    a = np.array([1.0, 1.0, 7.0, 2.0, 3.0]) * 1e-6
    made.rounds = {"fence": [np.stack([a, 1.2 * a], axis=1)]}
    assert made.report(["A", "B"])[-1].split() == [
        *("fence", "2.00", "2.40", "1.200", "0.000", "1.200", "1.200", "5")
    ]


def test_each_operation_runs_and_is_right(export):
    folder = export(ROOT, ROOT)
    args = ["--exported", str(folder), "--seconds", "0.1", "--passes", "1"]
    result = run_ranks(2, SCRIPT, args=args)
    assert result.returncode == 0, result.describe()
    lines = result.stdout.splitlines()[2:]
    assert [line[:38].strip() for line in lines] == [*compare.ORDERED, *compare.BLOCKING]

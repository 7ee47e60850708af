"""The figures of a node by the number of ranks: a line per run, with everything in it."""

import json
import sys

from tests.helpers.launch import ROOT, run_right


def test_each_number_of_ranks_has_a_line(tmp_path):
    script, results = ROOT / "scripts" / "lib" / "rank_counts.py", tmp_path / "counts.jsonl"
    for ranks in (1, 2):
        run_right(ranks, [sys.executable, "-m", "mpi4py", script, results])
    one, two = map(json.loads, results.read_text().splitlines())
    assert (one["ranks"], two["ranks"]) == (1, 2)
    for line in (one, two):
        assert all(time > 0 for unit in ("ms", "us") for time in line[unit].values())
        assert 0 < line["private_mib"] < 100

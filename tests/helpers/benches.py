"""The benchmark as its tests start it: programs with a change in them, and what rows must have."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import catalog
from mpishare.bench.cases import CASES
from mpishare.bench.report import COLUMNS
from tests.helpers.launch import TIMEOUT_S, run_ranks, run_right

catalog.extend()  # rows may be of its cases, too

BENCH = (sys.executable, "-m", "mpishare.bench")
BENCHMARKS = (sys.executable, "-m", "benchmarks")
QUICK = ("--iters", "5", "--repeat", "2", "--warmup", "1")
HOST = {"MPISHARE_BACKEND": "host"}


def altered(change: str) -> str:
    """A program that runs the benchmark after a change."""
    head = "import sys, time\nimport mpishare\nfrom benchmarks import catalog\n"
    head += "from benchmarks.__main__ import main\n"
    return f"{head}{change}\nsys.exit(main(sys.argv[1:]))\n"


# A fence that orders nothing, on ranks that are never at the same place.
NO_FENCE = """
def fence(self, stream=None):
    time.sleep(0.005 * self._rank)

mpishare.Window.fence = fence
"""
WITHOUT_FENCE = altered(NO_FENCE)


def measured(
    n: int, program: str | Sequence[str | Path], *words: str, timeout_s: float = TIMEOUT_S
) -> dict[str, Any]:
    """Return the header and the rows of a run on the host, which must end well."""
    result = run_right(n, program, [*words, "--format", "json"], timeout_s=timeout_s)
    return json.loads(result.stdout)  # nothing but the report


def checked_rows(n: int, program: str | Sequence[str | Path], *words: str) -> list[dict]:
    """Return the rows alone, once each was seen to be complete."""
    rows = measured(n, program, *words)["rows"]
    check_rows(rows, n)
    return rows


def rivals(n: int, program: str | Sequence[str | Path], *words: str) -> list[dict]:
    """Return the rows of what mpishare is set beside."""
    return [row for row in measured(n, program, *words)["rows"] if row["kind"] == "rival"]


def check_all_ok(rows: list[dict]) -> None:
    """All arms ran and were right."""
    assert all(row["ok"] for row in rows), rows


def check_rows(rows: list[dict], ranks: int) -> None:
    for row in rows:
        assert tuple(row) == COLUMNS, row
        assert row["case"] in CASES, row
        assert row["backend"] == "host", row
        assert row["ranks"] == ranks, row
        assert row["clock"] in ("latency", "throughput"), row
        assert isinstance(row["nbytes"], int), row
        of_halo = [row[key] for key in ("width", "fields", "corners")]
        assert (None in of_halo) == (of_halo == [None] * 3) == (not CASES[row["case"]].naxes)
        numbers = [row[key] for key in ("min_us", "median_us", "p95_us")]
        if row["ok"]:
            assert all(isinstance(number, float) for number in numbers), row
            assert numbers == sorted(numbers), row
            assert row["count"] > 0, row
            assert row["reason"] is None, row
        else:
            assert numbers == [None] * 3, row
            assert row["gb_per_s"] is None, row
            assert row["reason"], row


def wrong_arms(n: int, program: str, *words: str) -> set[str]:
    """Run a program with a mistake in it, which must end with status 1; return what is wrong."""
    result = run_ranks(n, program, args=[*words, "--format", "json", *QUICK], env=HOST)
    assert result.returncode == 1, result.describe()
    rows = json.loads(result.stdout)["rows"]
    check_rows(rows, n)
    wrong = [row for row in rows if row["wrong"]]
    assert all(row["reason"].startswith("wrong result") for row in wrong), result.describe()
    return {row["arm"] for row in wrong}

"""``python -m benchmarks compare a.json b.json``: two runs side by side, without MPI."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpishare.bench.report import COLUMNS, Row, aligned, format_us, size_text
from mpishare.cli import Parser, UsageError
from mpishare.errors import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

PROG = "python -m benchmarks compare"
_CLOCKS = {"latency": "latency", "throughput": "back to back"}


def main(argv: Sequence[str]) -> int:
    """Compare two files and return the exit status: 2 if they are not two runs."""
    parser = Parser(
        prog=PROG,
        description="Show the medians of two runs side by side, by case, variant, size and clock.",
        allow_abbrev=False,
    )
    parser.add_argument("a", metavar="a.json", help="the JSON of a run (--output a.json)")
    parser.add_argument("b", metavar="b.json", help="the JSON of another one")
    try:
        names = parser.parse_args(argv)
        sys.stdout.write(compared(names.a, names.b))
    except UsageError as exc:
        sys.stderr.write(f"{PROG}: {exc} (--help says more)\n")
        return 2
    return 0


def compared(a: str, b: str) -> str:
    """Return the table of two runs; `UsageError` if they have nothing in common."""
    (environment_a, rows_a), (environment_b, rows_b) = read_run(a), read_run(b)
    found_a, found_b = ({_key(row): row for row in rows} for rows in (rows_a, rows_b))
    both = [key for key in found_a if key in found_b]
    if not both:
        raise UsageError(f"{a} and {b} have no case, arm, size and clock in common")
    lines = [["case", "size", "variant", "clock", "a, us", "b, us", "b / a"]]
    last: tuple[Any, ...] = ()
    for key in both:
        row, other = found_a[key], found_b[key]
        place = row.case, row.nbytes
        case, size = (row.case, size_text(row.nbytes)) if place != last else ("", "")
        last = place
        cells = [case, size if row.nbytes else "", row.arm, _CLOCKS[row.clock]]
        lines.append([*cells, _median(row), _median(other), _ratio(row, other)])
    texts = [f"a: {a}: {_origin(environment_a)}", f"b: {b}: {_origin(environment_b)}", ""]
    texts += aligned(lines, left=(0, 2, 3))
    for letter, found, other_found in (("a", found_a, found_b), ("b", found_b, found_a)):
        alone = len(found.keys() - other_found.keys())
        if alone:
            texts += ["", f"in {letter} alone: {alone} of {len(found)} rows"]
    return "\n".join(texts) + "\n"


def _key(row: Row) -> tuple[Any, ...]:
    return row.case, row.nbytes, row.n, row.width, row.fields, row.corners, row.arm, row.clock


def _origin(environment: dict[str, Any]) -> str:
    """Return where a run is from: a difference here is one of the machine, not of the program."""
    gpus = sorted({str(gpu.get("name")) for gpu in environment.get("gpus", ())})
    parts = [
        environment.get("hostname"),
        *gpus,
        counted(environment.get("ranks", 0), "rank"),
        environment.get("date"),
    ]
    return ", ".join(str(part) for part in [*parts, environment.get("git_revision")] if part)


def _median(row: Row) -> str:
    failed = "wrong" if row.wrong else "not run"
    return failed if row.median_us is None else format_us(row.median_us)


def _ratio(row: Row, other: Row) -> str:
    is_known = row.median_us and other.median_us
    return f"{(other.median_us or 0) / (row.median_us or 1):.2f}" if is_known else ""


def read_run(name: str) -> tuple[dict[str, Any], list[Row]]:
    """Return the environment and the rows of a run; `UsageError` if the file is not one."""
    try:
        found = json.loads(Path(name).read_text())
        # A file of another revision may have more keys.
        rows = [{key: row[key] for key in COLUMNS if key in row} for row in found["rows"]]
        return dict(found["header"]), [Row(**row) for row in rows]
    except OSError as exc:
        raise UsageError(f"{name}: {exc.strerror}") from None
    except (ValueError, TypeError, LookupError):
        raise UsageError(f"{name}: not the JSON of a run (--output a.json)") from None

"""``python -m mpishare.bench compare a.json b.json``: two runs side by side, without MPI."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpishare.bench.report.render import console_of, format_us, without_padding
from mpishare.bench.report.rows import Row
from mpishare.cli import Parser, UsageError, is_first_process, is_terminal
from mpishare.errors import format_nbytes

if TYPE_CHECKING:
    from collections.abc import Sequence

PROG = "python -m mpishare.bench compare"
_REQUIRED = [
    field.name for field in dataclasses.fields(Row) if field.default is dataclasses.MISSING
]
_CLOCKS = {"latency": "latency", "throughput": "back to back"}


def main(argv: Sequence[str]) -> int:
    """Compare two files and return the exit status: 2 if they are not two runs."""
    parser = Parser(
        prog=PROG,
        description="Show the medians of two runs side by side, by case, variant, size and clock.",
        allow_abbrev=False,
    )
    parser.add_argument("a", help="the JSON of a run (--output a.json)")
    parser.add_argument("b", help="the JSON of another one")
    try:
        names = parser.parse_args(argv)
        text = compared(names.a, names.b, is_color=is_terminal(sys.stdout))
    except UsageError as exc:
        if is_first_process():
            sys.stderr.write(f"{PROG}: {exc} (--help says more)\n")
        return 2
    if is_first_process():
        sys.stdout.write(text)
    return 0


def compared(a: str, b: str, *, is_color: bool) -> str:
    """Return the table of two runs; `UsageError` if they have nothing in common."""
    from rich import box
    from rich.table import Table

    (environment_a, rows_a), (environment_b, rows_b) = read_run(a), read_run(b)
    found_a, found_b = ({_key(row): row for row in rows} for rows in (rows_a, rows_b))
    both = [key for key in found_a if key in found_b]
    if not both:
        raise UsageError(f"{a} and {b} have no case, arm, size and clock in common")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("case", "size", "arm", "clock"):
        table.add_column(head, justify="right" if head == "size" else "left")
    for head in ("a, us", "b, us", "b / a"):
        table.add_column(head, justify="right")
    last: tuple[Any, ...] = ()
    for key in both:
        row, other = found_a[key], found_b[key]
        place = row.case, row.nbytes
        if last and place != last:
            table.add_section()
        case, size = (row.case, format_nbytes(row.nbytes)) if place != last else ("", "")
        last = place
        cells = [case, size if row.nbytes else "", row.arm, _CLOCKS[row.clock]]
        table.add_row(*cells, _median(row), _median(other), _ratio(row, other))
    console = console_of(text := io.StringIO(), is_color=is_color)
    for letter, name, environment in (("a", a, environment_a), ("b", b, environment_b)):
        console.print(f"{letter}: {name}: {_origin(environment)}", soft_wrap=True)
    console.print(table)
    for letter, found, other_found in (("a", found_a, found_b), ("b", found_b, found_a)):
        alone = len(found.keys() - other_found.keys())
        if alone:
            console.print(f"in {letter} alone: {alone} of {len(found)} rows", soft_wrap=True)
    return without_padding(text)


def _key(row: Row) -> tuple[Any, ...]:
    return row.case, row.nbytes, row.n, row.width, row.fields, row.corners, row.arm, row.clock


def _origin(environment: dict[str, Any]) -> str:
    """Return where a run is from: a difference here is one of the machine, not of the program."""
    gpus = sorted({str(gpu.get("name")) for gpu in environment.get("gpus", ())})
    parts = [
        environment.get("hostname"),
        *gpus,
        f"{environment.get('ranks')} ranks",
        environment.get("date"),
    ]
    return ", ".join(str(part) for part in [*parts, environment.get("git_revision")] if part)


def _median(row: Row) -> str:
    if row.median_us is None:
        return "wrong" if row.wrong else "not run"
    return format_us(row.median_us)


def _ratio(row: Row, other: Row) -> str:
    if not row.median_us or other.median_us is None:
        return ""
    return f"{other.median_us / row.median_us:.2f}"


def read_run(name: str) -> tuple[dict[str, Any], list[Row]]:
    """Return the environment and the rows of a run; `UsageError` if the file is not one."""
    try:
        found = json.loads(Path(name).read_text())
    except OSError as exc:
        raise UsageError(f"{name}: {exc.strerror}") from None
    except ValueError as exc:
        raise UsageError(f"{name}: no JSON: {exc}") from None
    if not (isinstance(found, dict) and isinstance(found.get("header"), dict)):
        raise UsageError(f"{name}: not a run of the bench: it has no header")
    rows = found.get("rows")
    if not (isinstance(rows, list) and all(isinstance(row, dict) for row in rows)):
        raise UsageError(f"{name}: not a run of the bench: it has no rows")
    for row in rows:
        missing = [key for key in _REQUIRED if key not in row]
        if missing:
            raise UsageError(f"{name}: not a run of the bench: a row without {missing[0]!r}")
    known = {field.name for field in dataclasses.fields(Row)}
    # A file of another revision may have more keys.
    return found["header"], [
        Row(**{key: value for key, value in row.items() if key in known}) for row in rows
    ]

"""``python -m mpishare.bench compare a.json b.json``: two runs side by side, without MPI."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Any

from mpishare.bench.launch import Parser, UsageError, is_first_process, is_terminal
from mpishare.bench.runfile import read_run
from mpishare.bench.words import nbytes_words, us_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.bench.rows import Row

PROG = "python -m mpishare.bench compare"
_WIDTH = 1000
_CLOCKS = {"latency": "latency", "throughput": "back to back"}


def main(argv: Sequence[str]) -> int:
    """Compare two files and return the exit status: 2 if they are no two runs.

    Local.
    """
    parser = Parser(
        prog=PROG,
        description="Set the medians of two runs side by side: same case, arm, size and clock.",
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
    """Return the table of two files.

    Local.

    Raises
    ------
    UsageError
        If one of them is no run, or they have nothing in common.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    (header_a, rows_a), (header_b, rows_b) = read_run(a), read_run(b)
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
        case, size = (row.case, nbytes_words(row.nbytes)) if place != last else ("", "")
        last = place
        cells = [case, size if row.nbytes else "", row.arm, _CLOCKS[row.clock]]
        table.add_row(*cells, _median(row), _median(other), _ratio(row, other))
    text = io.StringIO()
    console = Console(
        file=text, force_terminal=is_color, width=_WIDTH, highlight=False, markup=False, emoji=False
    )
    for letter, name, header in (("a", a, header_a), ("b", b, header_b)):
        console.print(f"{letter}: {name}: {_origin(header)}", soft_wrap=True)
    console.print(table)
    for letter, found, other_found in (("a", found_a, found_b), ("b", found_b, found_a)):
        alone = len(found.keys() - other_found.keys())
        if alone:
            console.print(f"in {letter} alone: {alone} of {len(found)} rows", soft_wrap=True)
    return "".join(line.rstrip() + "\n" for line in text.getvalue().splitlines())


def _key(row: Row) -> tuple[Any, ...]:
    return row.case, row.nbytes, row.n, row.width, row.fields, row.corners, row.arm, row.clock


def _origin(header: dict[str, Any]) -> str:
    """Return where a run is from: what differs here tells of the machine, not of the program."""
    gpus = sorted({str(gpu.get("name")) for gpu in header.get("gpus", ())})
    parts = [header.get("hostname"), *gpus, f"{header.get('ranks')} ranks", header.get("date")]
    return ", ".join(str(part) for part in [*parts, header.get("git_revision")] if part)


def _median(row: Row) -> str:
    if row.median_us is None:
        return "wrong" if row.wrong else "not run"
    return us_words(row.median_us)


def _ratio(row: Row, other: Row) -> str:
    if not row.median_us or other.median_us is None:
        return ""
    return f"{other.median_us / row.median_us:.2f}"

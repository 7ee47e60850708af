"""``python -m benchmarks compare a.json b.json``: two runs side by side, without MPI."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpishare.bench.report import COLUMNS, Row, format_us, size_text
from mpishare.errors import counted
from mpishare.tools.cli import Parser, UsageError, aligned

PROG = "python -m benchmarks compare"
_CLOCKS = {"latency": "latency", "throughput": "back to back"}
_KEY = ("case", "nbytes", "n", "width", "fields", "corners", "arm", "clock")

Run = tuple[dict[str, Any], dict[tuple[Any, ...], Row]]


def main(argv: Sequence[str]) -> int:
    """Compare two files and return the exit status: 2 if they are not two runs."""
    about = "Show the medians of two runs side by side, by case, variant, size and clock."
    parser = Parser(prog=PROG, description=about, allow_abbrev=False)
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
    runs = {"a": read_run(a), "b": read_run(b)}
    (_, found), (_, others) = runs.values()
    if not found.keys() & others.keys():
        raise UsageError(f"{a} and {b} have no case, arm, size and clock in common")
    lines = [["case", "size", "variant", "clock", "a, us", "b, us", "b / a"]]
    last: tuple[Any, ...] = ()
    for row, other in ((row, others[key]) for key, row in found.items() if key in others):
        is_new, last = (row.case, row.nbytes) != last, (row.case, row.nbytes)
        head = [row.case if is_new else "", size_text(row.nbytes) if is_new and row.nbytes else ""]
        us, other_us = row.median_us, other.median_us
        ratio = "" if us is None or other_us is None else f"{other_us / us:.2f}"
        times = [_median(row), _median(other), ratio]
        lines.append([*head, row.arm, _CLOCKS[row.clock], *times])
    names = {"a": a, "b": b}
    texts = [f"{x}: {names[x]}: {_origin(header)}" for x, (header, _) in runs.items()]
    texts += ["", *aligned(lines, left=(0, 2, 3))]
    for letter, mine, theirs in (("a", found, others), ("b", others, found)):
        alone = len(mine.keys() - theirs.keys())
        texts += ["", f"in {letter} alone: {alone} of {len(mine)} rows"] if alone else []
    return "\n".join(texts) + "\n"


def _origin(header: dict[str, Any]) -> str:
    """Return where a run is from: a difference here is one of the machine, not of the program."""
    gpus = sorted({str(gpu.get("name")) for gpu in header.get("gpus", ())})
    parts = [header.get("hostname"), *gpus, counted(header.get("ranks", 0), "rank")]
    return ", ".join(filter(None, [*parts, header.get("date"), header.get("git_revision")]))


def _median(row: Row) -> str:
    failed = "wrong" if row.wrong else "not run"
    return failed if row.median_us is None else format_us(row.median_us)


def read_run(name: str) -> Run:
    """Return the header and the rows of a run; `UsageError` if the file is not one."""
    try:
        found = json.loads(Path(name).read_text())
        # A file of another revision may have more keys.
        rows = [Row(**{key: row[key] for key in COLUMNS if key in row}) for row in found["rows"]]
        header = dict(found["header"])
    except OSError as exc:
        raise UsageError(f"{name}: {exc.strerror}") from None
    except (ValueError, TypeError, LookupError):
        raise UsageError(f"{name}: not the JSON of a run (--output a.json)") from None
    return header, {tuple(getattr(row, key) for key in _KEY): row for row in rows}

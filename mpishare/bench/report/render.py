"""The report as a table, as JSON and as CSV."""

from __future__ import annotations

import csv
import io
import json
from itertools import groupby
from typing import TYPE_CHECKING, Any

from mpishare.bench.report.rows import CLOCKS, COLUMNS, OWN, UPPER_BOUND, Clock, Row
from mpishare.errors import format_nbytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.table import Table

#: The formats that the name of a file may ask for.
FILE_FORMATS = ("json", "csv")
#: Wider than any table, so that no column is squeezed.
_WIDTH = 1000


def render(kind: str, environment: dict[str, Any], rows: Sequence[Row], *, is_color: bool) -> str:
    """Return the report as text: a ``table``, ``json`` or ``csv``.

    `environment` is the header of the report; `is_color`: the text goes to a terminal.
    """
    if kind == "json":
        return as_json(environment, [row.as_dict() for row in rows])
    if kind == "csv":
        return _as_csv(rows)
    return _as_tables(environment, rows, is_color=is_color)


def as_json(environment: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Return a run as JSON with one line per key of the header and one line per row."""
    keys = ",\n".join(f"  {json.dumps(key)}: {json.dumps(of)}" for key, of in environment.items())
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    return f'{{\n "header": {{\n{keys}\n }},\n "rows": [\n{lines}\n ]\n}}\n'


def _as_csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(row.as_dict() for row in rows)
    return text.getvalue()


def _as_tables(environment: dict[str, Any], rows: Sequence[Row], *, is_color: bool) -> str:
    console = console_of(text := io.StringIO(), is_color=is_color)
    for line in environment_lines(environment):
        console.print(line, soft_wrap=True)
    for case, of_case in groupby(rows, key=lambda row: row.case):
        found = list(of_case)
        bounds = [row for row in found if row.kind == UPPER_BOUND]
        console.print()
        _print_rows(
            console,
            f"{case}{_halo_text(found[0])}",
            [row for row in found if row.kind != UPPER_BOUND],
        )
        if bounds:
            _print_rows(console, f"{case}: ceilings, which leave out order or data", bounds)
    if rows:
        console.print()
        console.print(_legend(environment), soft_wrap=True)
    for note in environment["notes"]:
        console.print(note, soft_wrap=True)
    return without_padding(text)


def console_of(text: io.StringIO, *, is_color: bool) -> Console:
    """Return a console that writes to `text`, wide enough for every table."""
    from rich.console import Console

    return Console(
        file=text, force_terminal=is_color, width=_WIDTH, highlight=False, markup=False, emoji=False
    )


def without_padding(text: io.StringIO) -> str:
    """Return what was written, without the padding at the end of lines."""
    return "".join(line.rstrip() + "\n" for line in text.getvalue().splitlines())


def format_us(us: float) -> str:
    """Return microseconds with three significant digits."""
    if us >= 100:
        return f"{us:,.0f}"
    return f"{us:.1f}" if us >= 10 else f"{us:.2f}"


def _legend(environment: dict[str, Any]) -> str:
    checked = "every result checked" if environment["options"]["check"] else "results NOT checked"
    return (
        "us, maximum over the ranks; latency: a synchronize after each, back to back: one after a "
        f"batch; {checked}.\n"
        "ratio: time / time of the fastest baseline (of a baseline: time of the fastest variant of "
        "mpishare / its time); below 1 mpishare is faster."
    )


def environment_lines(environment: dict[str, Any]) -> list[str]:
    """Return the lines above the tables."""
    versions = ", ".join(f"{name} {text}" for name, text in environment["versions"].items() if text)
    where = f"{_counted(environment['ranks'], 'rank')} on {_counted(environment['nodes'], 'node')}"
    cores = _counted(environment["cores"], "core")
    lines = [
        f"mpishare bench, {environment['date']}",
        f"{where}, backend {environment['backend']}, {cores}, {environment['hostname']}",
        f"{environment['mpi_library']}",
        versions,
    ]
    for gpu in environment["gpus"]:
        mps = ", under MPS" if gpu["mps"] else ""
        ranks = ", ".join(str(rank) for rank in gpu["ranks"])
        lines.append(f"{gpu['name']} {gpu['uuid']} at {gpu['pci_id']}{mps}: ranks {ranks}")
    if environment["gpus"]:
        links = sorted({str(link["link"]) for link in environment["links"]})
        driver = f"driver {environment['driver']}, CUDA {environment['cuda']}"
        lines.append(f"{driver}, links: {', '.join(links) or 'none'}")
    if environment["git_revision"]:
        lines.append(f"git {environment['git_revision']}")
    return lines


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _print_rows(console: Console, title: str, rows: Sequence[Row]) -> None:
    """Print one table: a line per variant and size, with both clocks side by side."""
    reasons = list(dict.fromkeys(row.reason for row in rows if row.reason is not None))
    lines: list[tuple[Row, list[str]]] = []
    for _, of_variant in groupby(rows, key=lambda row: (row.nbytes, row.arm)):
        clocks = {row.clock: row for row in of_variant}
        first = next(iter(clocks.values()))
        is_new = not lines or lines[-1][0].nbytes != first.nbytes
        sized = first.nbytes and is_new
        cells = [format_nbytes(first.nbytes) if sized else ""]
        cells += [str(first.n) if sized and first.n else "", first.arm]
        for clock in CLOCKS:
            cells += _cells(clocks.get(clock), reasons, clock)
        lines.append((first, cells))
    console.print(_table(title, lines))
    for number, reason in enumerate(reasons, 1):
        console.print(f"[{number}] {reason}", soft_wrap=True)


def _halo_text(row: Row) -> str:
    """Return what all rows of a halo case have in common, nothing for other cases."""
    if row.width is None:
        return ""
    kind = "with corners" if row.corners else "faces alone"
    return f": width {row.width}, {_counted(row.fields or 0, 'field')}, {kind}"


def _table(title: str, lines: Sequence[tuple[Row, list[str]]]) -> Table:
    """Return the table of these lines, without columns that are empty."""
    from rich import box
    from rich.table import Table

    heads = ["size", "cells\nan axis", "arm", "latency\nmedian", "\np95", "\nmin", "\nn", "\nratio"]
    heads += ["back to back\nmedian", "\np95", "\nn", "\nGB/s", "\nratio"]
    used = [index for index in range(len(heads)) if any(cells[index] for _, cells in lines)]
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index in used:
        table.add_column(heads[index], justify="left" if heads[index] == "arm" else "right")
    last = lines[0][0].nbytes
    for row, cells in lines:
        if row.nbytes != last:
            table.add_section()
            last = row.nbytes
        table.add_row(*(cells[index] for index in used), style=None if row.kind == OWN else "dim")
    return table


def _cells(row: Row | None, reasons: Sequence[str], clock: Clock) -> list[str]:
    """Return the cells of one clock: with the minimum for latency, with the rate for throughput."""
    if row is None:
        return [""] * 5
    if row.median_us is None or row.p95_us is None or row.min_us is None:
        verdict = "wrong" if row.wrong else "not run"
        return [f"{verdict} [{reasons.index(str(row.reason)) + 1}]", "", "", "", ""]
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    median, p95, count = format_us(row.median_us), format_us(row.p95_us), str(row.count)
    if clock == "latency":
        return [median, p95, format_us(row.min_us), count, ratio]
    rate = "" if row.gb_per_s is None else f"{row.gb_per_s:.3g}"
    return [median, p95, count, rate, ratio]

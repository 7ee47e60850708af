"""The report: as a table for people, as JSON and as CSV."""

from __future__ import annotations

import csv
import io
import json
from itertools import groupby
from typing import TYPE_CHECKING, Any

from mpishare.bench.rows import CLOCKS, COLUMNS, Clock, Row
from mpishare.bench.words import nbytes_words, us_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.table import Table

#: What a file is by the end of its name, whatever is shown.
FILE_FORMATS = ("json", "csv")
#: Wider than any table, so that none is squeezed into columns that cannot be read.
_WIDTH = 1000


def render(kind: str, header: dict[str, Any], rows: Sequence[Row], *, is_color: bool) -> str:
    """Return the report as text.

    Local.

    Parameters
    ----------
    kind : str
        ``table``, ``json`` or ``csv``.
    header : dict
        On what it was measured.
    rows : sequence of Row
        In the order of the report.
    is_color : bool
        Whether the text goes to a terminal.
    """
    if kind == "json":
        report = {"header": header, "rows": [row.as_dict() for row in rows]}
        return json.dumps(report, indent=1) + "\n"
    if kind == "csv":
        return _as_csv(rows)
    return _as_tables(header, rows, is_color=is_color)


def _as_csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(row.as_dict() for row in rows)
    return text.getvalue()


def _as_tables(header: dict[str, Any], rows: Sequence[Row], *, is_color: bool) -> str:
    from rich.console import Console

    text = io.StringIO()
    console = Console(
        file=text, force_terminal=is_color, width=_WIDTH, highlight=False, markup=False, emoji=False
    )
    for line in header_lines(header):
        console.print(line, soft_wrap=True)
    for case, of_case in groupby(rows, key=lambda row: row.case):
        found = list(of_case)
        ceilings = [row for row in found if row.kind == "ceiling"]
        console.print()
        _print_rows(
            console,
            f"{case}{_halo_words(found[0])}",
            [row for row in found if row.kind != "ceiling"],
        )
        if ceilings:
            _print_rows(console, f"{case}: ceilings, which leave out order or data", ceilings)
    if rows:
        console.print()
        console.print(_legend(header), soft_wrap=True)
    for note in header["notes"]:
        console.print(note, soft_wrap=True)
    # Padding at the end of lines is of no use to anyone.
    return "".join(line.rstrip() + "\n" for line in text.getvalue().splitlines())


def _legend(header: dict[str, Any]) -> str:
    checked = "every result checked" if header["options"]["check"] else "results NOT checked"
    return (
        "us, maximum over the ranks; latency: a synchronize after each, back to back: one after a "
        f"batch; {checked}.\n"
        "ratio: of an arm of mpishare its time over that of the fastest rival; of a rival that of "
        "the fastest arm of mpishare over its own. Below 1 mpishare is faster."
    )


def header_lines(header: dict[str, Any]) -> list[str]:
    """Return the header as lines for people.

    Local.
    """
    versions = ", ".join(f"{name} {text}" for name, text in header["versions"].items() if text)
    where = f"{_counted(header['ranks'], 'rank')} on {_counted(header['nodes'], 'node')}"
    cores = _counted(header["cores"], "core")
    lines = [
        f"mpishare bench, {header['date']}",
        f"{where}, backend {header['backend']}, {cores}, {header['hostname']}",
        f"{header['mpi_library']}",
        versions,
    ]
    for gpu in header["gpus"]:
        mps = ", under MPS" if gpu["mps"] else ""
        ranks = ", ".join(str(rank) for rank in gpu["ranks"])
        lines.append(f"{gpu['name']} {gpu['uuid']} at {gpu['pci_id']}{mps}: ranks {ranks}")
    if header["gpus"]:
        links = sorted({str(link["link"]) for link in header["links"]})
        lines.append(
            f"driver {header['driver']}, CUDA {header['cuda']}, links: {', '.join(links) or 'none'}"
        )
    if header["git_revision"]:
        lines.append(f"git {header['git_revision']}")
    return lines


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _print_rows(console: Console, title: str, rows: Sequence[Row]) -> None:
    """Print one table: a line an arm and size, with both clocks side by side."""
    reasons = list(dict.fromkeys(row.reason for row in rows if row.reason is not None))
    lines: list[tuple[Row, list[str]]] = []
    for _, of_arm in groupby(rows, key=lambda row: (row.nbytes, row.arm)):
        clocks = {row.clock: row for row in of_arm}
        first = next(iter(clocks.values()))
        is_new = not lines or lines[-1][0].nbytes != first.nbytes
        sized = first.nbytes and is_new
        cells = [nbytes_words(first.nbytes) if sized else ""]
        cells += [str(first.n) if sized and first.n else "", first.arm]
        for clock in CLOCKS:
            cells += _cells(clocks.get(clock), reasons, clock)
        lines.append((first, cells))
    console.print(_table(title, lines))
    for number, reason in enumerate(reasons, 1):
        console.print(f"[{number}] {reason}", soft_wrap=True)


def _halo_words(row: Row) -> str:
    """Return what all rows of a halo case have in common, nothing for another case."""
    if row.width is None:
        return ""
    kind = "with corners" if row.corners else "faces alone"
    return f": width {row.width}, {_counted(row.fields or 0, 'field')}, {kind}"


def _table(title: str, lines: Sequence[tuple[Row, list[str]]]) -> Table:
    """Return the table of these lines, without the columns that have nothing to say."""
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
        table.add_row(*(cells[index] for index in used), style=None if row.kind == "own" else "dim")
    return table


def _cells(row: Row | None, reasons: Sequence[str], clock: Clock) -> list[str]:
    """Return the cells of one clock: with the minimum for latency, with the rate for throughput."""
    if row is None:
        return [""] * 5
    if row.median_us is None or row.p95_us is None or row.min_us is None:
        verdict = "wrong" if row.wrong else "not run"
        return [f"{verdict} [{reasons.index(str(row.reason)) + 1}]", "", "", "", ""]
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    median, p95, count = us_words(row.median_us), us_words(row.p95_us), str(row.count)
    if clock == "latency":
        return [median, p95, us_words(row.min_us), count, ratio]
    rate = "" if row.gb_per_s is None else f"{row.gb_per_s:.3g}"
    return [median, p95, count, rate, ratio]

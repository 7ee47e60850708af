"""The report as tables, as JSON and as CSV."""

from __future__ import annotations

import csv
import io
import json
import math
import textwrap
from itertools import groupby
from typing import TYPE_CHECKING, Any

from mpishare.bench.cases import CASES, NOT_MPI
from mpishare.bench.report.rows import BASELINE, CLOCKS, COLUMNS, OWN, UPPER_BOUND, Row
from mpishare.errors import counted, format_nbytes, name_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The formats that the name of a file may ask for.
FILE_FORMATS = ("json", "csv")
#: The columns of a report that no terminal shows, and the most that one has.
WIDTH = 100
_GAP, _BOLD, _PLAIN = "  ", "\x1b[1m", "\x1b[0m"
_HEADS = ["size", "cells", "variant", "median", "p95", "min", "ratio"]
_HEADS += ["median", "p95", "GB/s", "ratio"]
_GROUPS = {3: "latency, us", 7: "back to back, us"}
#: The columns that are left out where a table is too wide, the first one first.
_SPARE = {5: "min", 8: "p95 back to back", 4: "p95", 1: "cells"}


def render(kind: str, environment: dict[str, Any], rows: Sequence[Row]) -> str:
    """Return the report as text: a ``table``, ``json`` or ``csv``; `environment` is its header."""
    if kind == "json":
        return as_json(environment, [row.as_dict() for row in rows])
    if kind == "csv":
        writer = csv.DictWriter(text := io.StringIO(), COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(row.as_dict() for row in rows)
        return text.getvalue()
    names = dict.fromkeys([*(row.case for row in rows), *environment["left_out"]])
    return heading(environment) + "".join(of_case(name, environment, rows) for name in names)


def as_json(environment: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Return a run as JSON with one line per key of the header and one line per row."""
    keys = ",\n".join(f"  {json.dumps(key)}: {json.dumps(of)}" for key, of in environment.items())
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    return f'{{\n "header": {{\n{keys}\n }},\n "rows": [\n{lines}\n ]\n}}\n'


def format_us(us: float) -> str:
    """Return microseconds with three significant digits."""
    if us >= 100:
        return f"{us:,.0f}"
    return f"{us:.1f}" if us >= 10 else f"{us:.2f}"


def aligned(lines: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """Return the lines of a table, whose columns stand to the right unless they are in `left`."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        _GAP.join(
            text.ljust(width) if index in left else text.rjust(width)
            for index, (text, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in lines
    ]


def heading(environment: dict[str, Any], width: int = WIDTH) -> str:
    """Return the lines above the tables: on what the run is, and what the columns are."""
    versions = ", ".join(f"{name} {text}" for name, text in environment["versions"].items() if text)
    where = f"{counted(environment['ranks'], 'rank')} on {counted(environment['nodes'], 'node')}"
    cores = counted(environment["cores"], "core")
    code = {"compiled": " (compiled C)", "python": " (Python)", None: ""}[environment["host_code"]]
    lines = [
        f"mpishare bench, {environment['date']}",
        f"{where}, backend {environment['backend']}{code}, {cores}, {environment['hostname']}",
        f"{environment['mpi_library']}",
        versions,
    ]
    for gpu in environment["gpus"]:
        mps = ", under MPS" if gpu["mps"] else ""
        ranks = name_ranks(gpu["ranks"])
        lines.append(f"{gpu['name']} {gpu['uuid']} at {gpu['pci_id']}{mps}: {ranks}")
    if environment["gpus"]:
        links = sorted({str(link["link"]) for link in environment["links"]})
        driver = f"driver {environment['driver']}, CUDA {environment['cuda']}"
        lines.append(f"{driver}, links: {', '.join(links) or 'none'}")
    if environment["git_revision"]:
        lines.append(f"git {environment['git_revision']}")
    checked = "every result checked" if environment["options"]["check"] else "results NOT checked"
    lines += [
        "",
        "*: mpishare; the others are baselines. Times are of the slowest rank, latency with a "
        f"synchronize after each, back to back with one after a batch; {checked}.",
        "ratio: time / time of the fastest baseline (of a baseline: time of the fastest variant of "
        "mpishare / its time); below 1 mpishare is faster. Lines below a table tell the opposite, "
        "the speed back to back: '2.1 times as fast'; (noisy): with a p95 of more than 3 medians.",
    ]
    if environment["ranks"] == 1:
        lines.append(
            "One rank is its own neighbor, and nothing goes to another process. Start several: "
            "mpirun -n 4 python -m mpishare.bench"
        )
    return _filled([*lines, *environment["notes"]], width)


def _filled(lines: Sequence[str], width: int) -> str:
    """Return lines of text, those that are too long broken."""
    wrap = textwrap.TextWrapper(width, subsequent_indent="  ", break_on_hyphens=False)
    return "".join(f"{wrap.fill(line)}\n" for line in lines)


def of_case(
    case: str,
    environment: dict[str, Any],
    rows: Sequence[Row],
    width: int = WIDTH,
    *,
    is_color: bool = False,
) -> str:
    """Return the tables of a case and what there is to say about them.

    `is_color`: the text goes to a terminal.
    """
    found = [row for row in rows if row.case == case]
    bounds = [row for row in found if row.kind == UPPER_BOUND]
    others = [row for row in found if row.kind != UPPER_BOUND]
    texts = [""]
    if others:
        title = f"{case}{_halo_text(others[0])}"
        if case in CASES and CASES[case].note:
            title += "\n" + _filled([CASES[case].note], width).rstrip()
        texts.append(_table(title, others, width, is_color=is_color))
    if bounds:
        title = f"{case}: ceilings, which leave out order or data"
        texts.append(_table(title, bounds, width, is_color=is_color))
    left_out = [f"{case} {text}" for text in environment["left_out"].get(case, ())]
    texts.append(_filled([*left_out, *_speeds(case, others)], width))
    return "\n".join(texts)


def _halo_text(row: Row) -> str:
    """Return what all rows of a halo case have in common, nothing for other cases."""
    if row.width is None:
        return ""
    kind = "with corners" if row.corners else "faces alone"
    fields = counted(row.fields or 0, "field")
    return f": width {row.width}, {fields}, {kind}; cells: of a rank, along an axis"


def _table(title: str, rows: Sequence[Row], width: int, *, is_color: bool) -> str:
    """Return one table: a line per variant and size, with both clocks side by side."""
    reasons = list(dict.fromkeys(row.reason for row in rows if row.reason is not None))
    table, owners = [_HEADS], [rows[0]]
    for (nbytes, arm), of_variant in groupby(rows, key=lambda row: (row.nbytes, row.arm)):
        clocks = {row.clock: row for row in of_variant}
        row = next(iter(clocks.values()))
        is_new = len(table) == 1 or nbytes != owners[-1].nbytes
        if is_new and len(table) > 1:
            table.append([""] * len(_HEADS))
            owners.append(row)
        cells = [format_nbytes(nbytes) if is_new and nbytes else ""]
        cells += [str(row.n) if is_new and row.n else "", f"{' *'[row.kind == OWN]} {arm}"]
        table.append(cells + [text for clock in CLOCKS for text in _cells(clocks.get(clock))])
        owners.append(row)
    widths = [max(map(len, column)) + len(_GAP) for column in zip(*table, strict=True)]
    columns = [index for index in range(len(_HEADS)) if any(cells[index] for cells in table[1:])]
    notes = [f"[{number}] {reason}" for number, reason in enumerate(reasons, 1)]
    left_out: list[str] = []
    for index, name in _SPARE.items():
        if index in columns and sum(widths[each] for each in columns) - len(_GAP) > width:
            columns.remove(index)
            left_out.append(name)
    notes += [f"Left out at {width} columns: {', '.join(left_out)}."] if left_out else []
    groups = ""
    for index, name in _GROUPS.items():
        if index in columns:
            groups = groups.ljust(sum(widths[each] for each in columns if each < index)) + name
    lead = sum(widths[index] for index in columns if index < 3)
    lines = [[cells[index] for index in columns] for cells in table]
    printed = aligned(lines, left=(columns.index(2),))
    for number, row in enumerate(owners):
        if row.reason is not None and printed[number] and number:
            verdict = "wrong" if row.wrong else "not run"
            printed[number] = f"{printed[number]:{lead}}{verdict} [{reasons.index(row.reason) + 1}]"
        if is_color and number and printed[number] and row.kind == OWN:
            printed[number] = f"{_BOLD}{printed[number]}{_PLAIN}"
    return "\n".join([title, "", groups, *printed, ""]) + _filled(notes, width)


def _cells(row: Row | None) -> list[str]:
    """Return the cells of one clock: with the minimum for latency, with the rate for throughput."""
    if row is None or row.median_us is None or row.p95_us is None or row.min_us is None:
        return [""] * 4
    rate = "" if row.gb_per_s is None else f"{row.gb_per_s:.2f}"
    third = format_us(row.min_us) if row.clock == "latency" else rate
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    return [format_us(row.median_us), format_us(row.p95_us), third, ratio]


def _speeds(case: str, rows: Sequence[Row]) -> list[str]:
    """Return how many times as fast as the best baseline each variant of mpishare is."""
    baselines = {row.arm for row in rows if row.kind == BASELINE and row.median_us}
    kind = "baseline" if any(arm.startswith(NOT_MPI) for arm in baselines) else "MPI form"
    best = f"the best {kind}" if len(baselines) > 1 else "".join(baselines)
    times: dict[str, list[str]] = {}
    for row in rows:
        if row.kind == OWN and row.ratio and row.clock == rows[-1].clock:
            size = f" {format_nbytes(row.nbytes)}" if row.nbytes else ""
            shown = format(1 / row.ratio, ".1f" if row.ratio < 1.005 else ".2g")
            if row.is_noisy or any(each.is_noisy for each in _baselines_of(row, rows)):
                shown += " (noisy)"
            times.setdefault(row.arm, []).append(f"{size}: {shown}")
    return [
        f"{case}{','.join(found)} times as fast as {best}{'' if arm == case else f' ({arm})'}"
        for arm, found in times.items()
    ]


def _baselines_of(row: Row, rows: Sequence[Row]) -> list[Row]:
    """Return the baseline that a variant's ratio is of; several where they are equally fast."""
    fastest_us = (row.median_us or math.nan) / (row.ratio or math.nan)
    of_size = [each for each in rows if (each.nbytes, each.clock) == (row.nbytes, row.clock)]
    return [
        each
        for each in of_size
        if each.kind == BASELINE and math.isclose(each.median_us or math.nan, fastest_us)
    ]

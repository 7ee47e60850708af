"""The rows of a report, and its text: the header, a table per case, the summary, JSON."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import numpy as np

from mpishare.bench.cases import CASES
from mpishare.errors import counted, format_nbytes, grouped, name_ranks
from mpishare.tools.cli import aligned

Clock = Literal["latency", "throughput"]
CLOCKS: tuple[Clock, ...] = ("latency", "throughput")
Quartiles = tuple[float, float]
#: As in the files: a variant of mpishare, a baseline, or an upper bound, which is what the machine
#: can do with no order in it or no data.
Kind = Literal["own", "rival", "ceiling"]
OWN: Kind = "own"
BASELINE: Kind = "rival"
UPPER_BOUND: Kind = "ceiling"
#: Columns of the text around tables.
_WIDTH = 79


@dataclass
class Row:
    """What one variant took at one size on one clock. The fields are the keys in JSON."""

    case: str
    arm: str  # the variant
    backend: str
    ranks: int  # each time is the maximum over them
    nbytes: int  # one face or message; 0 where no data moves
    clock: Clock  # latency: a synchronize after each iteration; throughput: after a batch of them
    # Of one iteration; None where the variant did not run, or gave a wrong result.
    median_us: float | None = None
    p95_us: float | None = None
    min_us: float | None = None
    quartiles_us: Quartiles | None = None
    count: int = 0  # of samples: iterations, or batches of them
    gb_per_s: float | None = None  # what one rank sends in an iteration, over the median
    ok: bool = False  # whether it ran and no check found it wrong
    reason: str | None = None  # why there is no number
    wrong: bool = False  # whether that is because a check found a wrong result
    kind: Kind = OWN
    # Of a variant of mpishare: the fastest baseline, the median over that of this baseline, and
    # what they amount to: "2.3 x faster", "1.4 x slower", "as fast", "unclear".
    fastest: str | None = None
    ratio: float | None = None
    speed: str | None = None
    # For a halo case: owned cells per rank along each axis, ghosts per side, fields per exchange,
    # and whether edges and corners were exchanged too.
    n: int | None = None
    width: int | None = None
    fields: int | None = None
    corners: bool | None = None

    def as_dict(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in COLUMNS}
        floats = {name: value for name, value in values.items() if isinstance(value, float)}
        # Six digits are more than any clock resolves.
        return values | {name: float(f"{value:.6g}") for name, value in floats.items()}

    def fill(self, samples_s: Sequence[float], sent_nbytes: int) -> None:
        """Set the statistics from the time of each iteration, in which a rank sends so much."""
        us = np.asarray(samples_s) * 1e6
        low, self.median_us, high, self.p95_us = map(float, np.percentile(us, (25, 50, 75, 95)))
        self.quartiles_us = float(f"{low:.6g}"), float(f"{high:.6g}")
        self.min_us = float(us.min())
        self.count = int(us.size)
        if sent_nbytes and self.median_us > 0:
            self.gb_per_s = sent_nbytes / self.median_us / 1e3
        self.ok = True

    def fail(self, reason: str, *, wrong: bool) -> None:
        self.reason, self.wrong = reason, wrong


#: The keys of a row in JSON.
COLUMNS = tuple(field.name for field in dataclasses.fields(Row))


def _time(row: Row) -> str:
    return "" if row.median_us is None else format_us(row.median_us)


def _speed(row: Row) -> str:
    return row.speed or ""


def _rate(row: Row) -> str:
    return "" if row.gb_per_s is None else f"{row.gb_per_s:.2f}"


#: Columns behind the size and the variant: the head, the clock of the row, and its text.
_TABLE: tuple[tuple[str, Clock, Callable[[Row], str]], ...] = (
    ("latency, us", "latency", _time),
    ("speed", "latency", _speed),
    ("back to back, us", "throughput", _time),
    ("speed", "throughput", _speed),
    ("GB/s", "throughput", _rate),
)


def compare(rows: Sequence[Row], against: Mapping[str, Sequence[str] | None]) -> None:
    """Compare each variant of one case and size with the fastest `against` it, None: of all."""
    timed = [row for row in rows if row.median_us]
    for row in (row for row in timed if row.kind == OWN):
        names = against.get(row.arm, ())
        baselines = [each for each in timed if (each.kind, each.clock) == (BASELINE, row.clock)]
        others = [each for each in baselines if names is None or each.arm in names]
        if others:
            fastest = min(others, key=_median)
            row.fastest, row.ratio = fastest.arm, _median(row) / _median(fastest)
            row.speed = _speed_of(row.ratio, row.quartiles_us, fastest.quartiles_us)


def _median(row: Row) -> float:
    return row.median_us or 0.0


def _speed_of(ratio: float, mine: Quartiles | None, theirs: Quartiles | None) -> str:
    """Return how fast a variant is: no factor where its quartiles and the baseline's overlap."""
    factor = max(ratio, 1 / ratio)
    if mine and theirs and mine[0] <= theirs[1] and theirs[0] <= mine[1]:
        return "as fast" if factor < 1.1 else "unclear"
    shown = f"{factor:,.0f}" if factor >= 10 else f"{factor:.1f}"
    return "as fast" if shown == "1.0" else f"{shown} x {'faster' if ratio < 1 else 'slower'}"


def as_json(environment: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Return a run as JSON with one line per key of the header and one line per row."""
    keys = ",\n".join(f"  {json.dumps(key)}: {json.dumps(of)}" for key, of in environment.items())
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    return f'{{\n "header": {{\n{keys}\n }},\n "rows": [\n{lines}\n ]\n}}\n'


def size_text(nbytes: int) -> str:
    """Return a size with one decimal place at most."""
    number, unit = format_nbytes(nbytes).split()
    return f"{round(float(number), 1):g} {unit}"


def format_us(us: float) -> str:
    """Return microseconds with three significant digits."""
    if us >= 100:
        return f"{us:,.0f}"
    return f"{us:.1f}" if us >= 10 else f"{us:.2f}"


def heading(environment: dict[str, Any]) -> str:
    """Return the lines above the tables: on what the run is, and what the columns are."""
    found = environment
    where = f"{counted(found['ranks'], 'rank')} on {counted(found['nodes'], 'node')}"
    cores = f"{counted(found['cores'], 'core')}, load average {found['load']:.1f}"
    code = {"compiled": " (compiled C)", "python": " (Python)", None: ""}[found["host_code"]]
    lines = [
        f"mpishare bench, {found['date']}",
        f"{where}, backend {found['backend']}{code}, {cores}, {found['hostname']}",
        found["mpi_library"],
        ", ".join(f"{name} {text}" for name, text in found["versions"].items() if text),
        *_gpus(found),
    ]
    if found["git_revision"]:
        lines.append(f"git {found['git_revision']}")
    checked = "every result checked" if found["options"]["check"] else "results NOT checked"
    lines += [
        "",
        "*: mpishare; the others are baselines. Times are of the slowest rank, latency with a "
        f"synchronize after each, back to back with one after a batch; {checked}.",
        "speed: of a variant of mpishare against the fastest baseline, by their medians: 'x "
        "faster' or 'x slower' where the quartiles of their times do not overlap, else 'as fast', "
        "or 'unclear' where the medians differ by a tenth or more.",
    ]
    if found["load"] > found["cores"] / 2:
        lines.append("Other programs ran when the run began: repeat it on a quiet machine.")
    if found["ranks"] == 1:
        lines.append(
            "One rank is its own neighbor, and nothing goes to another process. Start several: "
            "mpirun -n 4 python -m mpishare.bench"
        )
    return filled([*lines, *found["notes"]])


def _gpus(environment: dict[str, Any]) -> list[str]:
    if not environment["gpus"]:
        return []
    driver = f"driver {environment['driver']}, CUDA {environment['cuda']}"
    lines = [
        f"{gpu['name']} {gpu['uuid']} at {gpu['pci_id']}{', under MPS' if gpu['mps'] else ''}: "
        f"{name_ranks(gpu['ranks'])}"
        for gpu in environment["gpus"]
    ]
    return [*lines, f"{driver}, links: {', '.join(environment['links']) or 'none'}"]


def filled(lines: Sequence[str], indent: int = 2) -> str:
    """Return lines of text, those that are too long broken."""
    wrap = textwrap.TextWrapper(_WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)
    return "".join(f"{wrap.fill(line)}\n" for line in lines)


def of_case(case: str, environment: dict[str, Any], rows: Sequence[Row]) -> str:
    """Return the tables of a case, and what was left out of it."""
    found = [row for row in rows if row.case == case]
    others = [row for row in found if row.kind != UPPER_BOUND]
    note = CASES[case].note if case in CASES else ""
    title = f"{case}{_halo_text(others)}\n{filled([note] * bool(note))}".rstrip()
    texts = ["", *_table(title, others)]
    bounds = [row for row in found if row.kind == UPPER_BOUND]
    texts += _table(f"{case}: upper bounds, which leave out order or data", bounds)
    left_out = environment["left_out"].get(case, ())
    return "\n".join(texts) + filled([f"{case} {text}" for text in left_out])


def _halo_text(rows: Sequence[Row]) -> str:
    """Return what all rows of a halo case have in common, nothing for other cases."""
    if not rows or rows[0].width is None:
        return ""
    kind = "with corners" if rows[0].corners else "faces only"
    fields = counted(rows[0].fields or 0, "field")
    return f": width {rows[0].width}, {fields}, {kind}"


def _table(title: str, rows: Sequence[Row]) -> list[str]:
    """Return one table, if any: a line per variant and size, with both clocks side by side."""
    if not rows:
        return []
    reasons = list(dict.fromkeys(row.reason for row in rows if row.reason is not None))
    lines = [*_lines(rows, reasons)]
    columns = [index for index in range(len(lines[0])) if any(cells[index] for cells in lines[1:])]
    filled_columns = [[cells[index] for index in columns] for cells in lines]
    notes = [f"[{number}] {reason}" for number, reason in enumerate(reasons, 1)]
    table = aligned(filled_columns, (columns.index(1),))
    return ["\n".join([title, "", *table, ""]) + filled(notes)]


def _lines(rows: Sequence[Row], reasons: Sequence[str]) -> Iterator[list[str]]:
    """Yield the cells of each line; one that failed has a word on it instead of its speed."""
    heads = ["size", "variant", *(head for head, *_ in _TABLE)]
    yield heads
    for number, (nbytes, of_size) in enumerate(groupby(rows, key=lambda row: row.nbytes)):
        if number:
            yield [""] * len(heads)
        size = size_text(nbytes) if nbytes else ""
        for arm, of_variant in groupby(of_size, key=lambda row: row.arm):
            clocks = {row.clock: row for row in of_variant}
            row = next(iter(clocks.values()))
            cells = [text(clocks[of]) if of in clocks else "" for _, of, text in _TABLE]
            if row.reason:
                place = [each[1:] for each in _TABLE].index((row.clock, _speed))
                number = reasons.index(row.reason) + 1
                cells[place] = f"{'wrong' if row.wrong else 'not run'} [{number}]"
            yield [size, f"{' *'[row.kind == OWN]} {arm}", *cells]
            size = ""


def _order(row: Row) -> tuple[float, float]:
    """Return the time of the baseline of a row, then its own: the fastest baseline counts."""
    median, ratio = row.median_us or 0.0, row.ratio or 1.0
    return float(f"{median / ratio:.9g}"), median  # the same for all rows with one baseline


def summary(rows: Sequence[Row]) -> str:
    """Return a line per case: the fastest variant of mpishare against the fastest baseline."""
    lines = {case: _summary(case, [*found]) for case, found in groupby(rows, lambda row: row.case)}
    if not lines:
        return ""
    title = (
        "mpishare's fastest variant against the fastest baseline, back to back (setup: latency):"
    )
    return f"\n{title}\n{listed(lines.items())}"


def listed(items: Iterable[tuple[str, str]]) -> str:
    """Return a line for each name and its text, the texts below each other."""
    pairs = list(items)
    width = max(len(name) for name, _ in pairs)
    return filled([f"{name:<{width}} {text}" for name, text in pairs], width + 1)


def _summary(case: str, rows: Sequence[Row]) -> str:
    """Return what is said of a case: by size where the case has sizes, else by variant."""
    is_sized, clock = CASES[case].is_sized, rows[-1].clock
    compared = grouped(
        (size_text(row.nbytes) if is_sized else row.arm, row)
        for row in rows
        if row.speed and row.clock == clock
    )
    texts = [f"{label}: {min(of, key=_order).speed}" for label, of in compared.items()]
    wrong = dict.fromkeys(row.arm for row in rows if row.wrong)
    texts += [f"WRONG: {', '.join(wrong)}"] if wrong else []
    return ", ".join(texts) or "nothing to compare with"

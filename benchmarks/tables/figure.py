"""The figures of times over sizes, as SVG that takes the colors of the page around it."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from others import COLUMNS, SUMS
from tables import CLOCKS, RUNS, origin, read, size, us

WIDTH, HEIGHT = 400, 270
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 30, 42
RATIOS, MOST = 112, 1.25  # the height of a panel of ratios, and the largest in it
BY_HAND_KERNEL = "NCCL in a kernel"
SPACE = 46  # between the names of two sizes
ENTRY = 18  # the height of a name below the chart
MANY = 6  # other lines: above it a chart leaves out libraries that are the fastest at no size
#: Colors that color-blind readers tell apart, and that show on white and on black.
OWN_STYLES = (("#0072B2", "2.5", "none"), ("#56B4E9", "2.5", "none"))
STYLES = (
    ("#D55E00", "1.8", "6 3"),
    ("#9467BD", "1.8", "10 4"),
    ("#009E73", "1.8", "2 3"),
    ("#CC79A7", "1.8", "8 3 2 3"),
    ("#B8860B", "1.8", "4 4"),
    ("#808080", "1.8", "1 4"),
    ("currentColor", "1.8", "3 2"),
)
#: In a page it has the page's color, alone that of the browser's theme.
HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" class="mpishare" role="img" \
font-family="Helvetica, Arial, sans-serif" font-size="12" fill="currentColor">
<title>{title}</title>
<style>
.mpishare {{ color: var(--color-foreground-primary, #1f2328) }}
@media (prefers-color-scheme: dark) {{ \
.mpishare {{ color: var(--color-foreground-primary, #e6edf3) }} }}
</style>"""

Arms = dict[str, Iterable[str]]  # by the name of a line: of these arms the fastest at each size
Line = list[dict]  # the rows of one, by size

FIELDS: Arms = {
    "mpishare, any arrays": ["private fields"],
    "mpishare, in windows": ["window fields"],
}
RING: Arms = {
    "mpishare, fence": ["window fence"],
    "mpishare, post to wait": ["window pairwise"],
}
SPREAD: Arms = {
    "mpishare, any arrays": ["private", "private graph"],
    "mpishare, in windows": ["windows", "windows graph"],
}
GATHERS: Arms = {
    "staged MPI": ["staged"],
    "NCCL": ["nccl", "nccl graph"],
    "NCCL in a window": ["nccl4py", "nccl4py graph"],
}
SUM: Arms = {"mpishare": ["reduce"]}
SUMS_OF_OTHERS: Arms = {
    name: arms[:1] for name, arms in SUMS.items() if arms[0] not in ("reduce", "float")
}
MESSAGES: Arms = {"mpishare, out of GPU memory": ["messages"]}
IN_PLACE: Arms = {"by hand, in place": ["mpi"]}
PACKED: Arms = {"by hand, packed": ["mpi"]}
THROUGH_HOST: Arms = {"mpishare, through the host": ["through the host"]}


@dataclass(frozen=True)
class Chart:
    """What is drawn: lines of mpishare, and of all else that ran, unless `others` names it."""

    run: str
    case: str
    title: str
    own: Arms
    others: Arms | None = None
    has_ratios: bool = False

    def lines(self, rows: list[dict]) -> tuple[dict[str, Line], dict[str, Line]]:
        """The points of mpishare's lines and of those of others, back to back."""
        ran: dict[str, Line] = {}
        for row in rows:
            if (row["case"], row["clock"], row["ok"]) == (self.case, CLOCKS[1], True):
                ran.setdefault(row["arm"], []).append(row)
        others = self.others
        if others is None:
            known = {arm: name for name, arms in COLUMNS.items() for arm in arms}
            rivals = [arm for arm, of in ran.items() if of[0]["kind"] == "rival"]
            others = {known.get(arm, arm): [] for arm in rivals}
            for arm in rivals:
                others[known.get(arm, arm)].append(arm)
        mine, theirs = (
            {k: _fastest(ran, v) for k, v in each.items()} for each in (self.own, others)
        )
        theirs = {name: line for name, line in theirs.items() if line}
        if len(theirs) > MANY:
            best = _fastest(theirs, theirs)
            theirs = {name: of for name, of in theirs.items() if any(row in best for row in of)}
        return {name: line for name, line in mine.items() if line}, theirs


GPUS, CORES = "two H200, a rank each", "32 ranks on 32 cores"
#: By the name of the file, in the order of the page; the first is the figure of the README.
CHARTS = {
    "halo1d": Chart("gpus2", "halo1d", f"1-D halo exchange, {GPUS}", FIELDS, has_ratios=True),
    "halo3d": Chart("sums-gpus2", "halo3d", f"3-D halo, six faces, {GPUS}", FIELDS),
    "ring": Chart("gpus2", "ring", f"Two faces in a ring, {GPUS}", RING),
    "allreduce": Chart("sums-gpus2", "allreduce", f"Sum, called, {GPUS}", SUM, SUMS_OF_OTHERS),
    "halo1d-mps": Chart(
        "onegpu-ranks4-mps", "halo1d", "1-D halo, one H200, 4 ranks under MPS", FIELDS
    ),
    **{
        f"{case}-{mpi}": Chart(
            f"cpu32-{mpi}-ranks32", case, f"{case[-2]}-D halo, {CORES}, {name}", FIELDS
        )
        for mpi, name in (("mpich", "MPICH"), ("openmpi", "Open MPI"))
        for case in ("halo1d", "halo3d")
    },
    "messages1d": Chart(
        "messages-gpus2", "messages1d", "Messages of slabs, two H200",
        MESSAGES | THROUGH_HOST, IN_PLACE,
    ),
    "messages3d": Chart(
        "messages-gpus2", "messages3d", "Messages of blocks, two H200",
        MESSAGES | THROUGH_HOST, PACKED,
    ),
    "redistribute": Chart("redistribute-gpus2", "redistribute", f"Another axis, {GPUS}", SPREAD),
    "allgather": Chart("redistribute-gpus2", "allgather", f"All-gather, {GPUS}", SPREAD, GATHERS),
}  # fmt: skip


def of_runs(folder: Path) -> dict[str, tuple[Chart, dict]]:
    """The charts whose run is there and has their case, each with the run."""
    found = {}
    for name, chart in CHARTS.items():
        file = folder / f"{chart.run}.json"
        if file.exists():
            run = read(file, is_whole=False)
            if all(chart.lines(run["rows"])):
                found[name] = chart, run
    return found


def shown(folder: Path, *names: str) -> list[str]:
    """The lines of a page that show charts, each with its run."""
    lines = []
    for name, (chart, run) in of_runs(folder).items():
        if name in names:
            about, _ = origin(run["header"])
            lines += [f"![{chart.title}: times over bytes](figures/{name}.svg)", ""]
            lines += [f"*{RUNS[chart.run]}*: {about}", ""]
    return lines


def svg(chart: Chart, run: dict) -> str:
    """Draw the medians, with a band from the least to the 95th percentile, and the names below.

    With ratios a second panel has the fastest of mpishare over the fastest of the others.
    """
    own, others = chart.lines(run["rows"])
    drawn = own | others
    points = [row for line in drawn.values() for row in line]
    day = run["header"]["date"][:10]
    every = sorted({row["nbytes"] for row in points})
    low = math.floor(math.log10(min(row["min_us"] for row in points)))
    high = math.ceil(math.log10(max(row["p95_us"] for row in points)))

    def x(nbytes: float) -> float:
        first, last = math.log(every[0]), math.log(every[-1])
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log(nbytes) - first) / (last - first)

    def y(time: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (math.log10(time) - low) / (high - low)

    def path(rows: Iterable[dict], what: str) -> str:
        return " ".join(f"{x(row['nbytes']):.1f},{y(row[what]):.1f}" for row in rows)

    below = HEIGHT + RATIOS * chart.has_ratios
    height = below + ENTRY * len(drawn) + 6
    parts = [
        HEAD.format(width=WIDTH, height=height, title=chart.title),
        f'<text x="2" y="16" font-size="13" font-weight="bold">{chart.title}</text>',
    ]
    for power in range(low, high + 1):
        at = y(10**power)
        parts.append(
            f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="currentColor" '
            'stroke-opacity=".15"/>'
        )
        parts.append(
            f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{_time(power)}</text>'
        )
    for nbytes in _apart(every, x):
        anchor = "end" if nbytes == every[-1] else "middle"
        at = WIDTH - 2 if anchor == "end" else x(nbytes)
        parts.append(
            f'<text x="{at:.1f}" y="{HEIGHT - 24}" text-anchor="{anchor}">{size(nbytes)}</text>'
        )
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle" '
        f'fill-opacity=".75">bytes; time per call, back to back, {day}</text>'
    )
    styles = dict(zip(own, OWN_STYLES, strict=False)) | _styles(others)
    for number, (name, line) in reversed(list(enumerate(drawn.items()))):
        color, width, dash = styles[name]
        stroke = f'stroke="{color}" stroke-width="{width}" stroke-dasharray="{dash}"'
        band = f"{path(line, 'min_us')} {path(reversed(line), 'p95_us')}"
        parts.append(f'<polygon points="{band}" fill="{color}" fill-opacity=".15"/>')
        parts.append(f'<polyline points="{path(line, "median_us")}" fill="none" {stroke}/>')
        parts += [
            f'<circle cx="{x(row["nbytes"]):.1f}" cy="{y(row["median_us"]):.1f}" r="2.6" '
            f'fill="{color}"/>'
            for row in line
        ]
        at = below + ENTRY * number + 10
        parts.append(
            f'<path d="M{LEFT} {at - 4}h34" {stroke}/>'
            f'<circle cx="{LEFT + 17}" cy="{at - 4}" r="2.6" fill="{color}"/>'
            f'<text x="{LEFT + 42}" y="{at}">{name}: {_span(line)}</text>'
        )
    if chart.has_ratios:
        parts += _ratios(_fastest(own, own), others, x)
    return "\n".join([*parts, "</svg>", ""])


def _ratios(own: Line, others: dict[str, Line], x: Callable[[float], float]) -> list[str]:
    """A panel with the ratios to the fastest library, and dashed to a kernel written by hand."""
    top, bottom = HEIGHT + 32, HEIGHT + RATIOS - 12

    def y(ratio: float) -> float:
        return bottom - (bottom - top) * ratio / MOST

    about = "mpishare over the fastest library; dashed: over a kernel by hand"
    parts = [f'<text x="2" y="{top - 16}">{about}</text>']
    for ratio in (0, 1):
        line = f"M{LEFT} {y(ratio):.1f}H{WIDTH - RIGHT}"
        parts.append(f'<path d="{line}" stroke="currentColor" stroke-opacity=".3"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{y(ratio) + 4:.1f}" text-anchor="end">{ratio}</text>'
        )
    libraries = [name for name in others if name != BY_HAND_KERNEL]
    for names, dash in ((libraries, "none"), ([BY_HAND_KERNEL], "4 4")):
        beside = {row["nbytes"]: row["median_us"] for row in _fastest(others, names)}
        spots = [
            (row["nbytes"], row["median_us"] / beside[row["nbytes"]])
            for row in own
            if row["nbytes"] in beside
        ]
        path = " ".join(f"{x(nbytes):.1f},{y(ratio):.1f}" for nbytes, ratio in spots)
        color = OWN_STYLES[0][0]
        stroke = f'stroke="{color}" stroke-width="2" stroke-dasharray="{dash}"'
        parts.append(f'<polyline points="{path}" fill="none" {stroke}/>')
        for nbytes, ratio in spots if dash == "none" else ():
            ends = {spots[0][0]: "start", spots[-1][0]: "end"}
            is_below = ratio > MOST / 2 and nbytes != spots[-1][0]  # beside its neighbor's
            at, up = x(nbytes), y(ratio) + (15 if is_below else -6)
            text = f'x="{at:.1f}" y="{up:.1f}" text-anchor="{ends.get(nbytes, "middle")}"'
            parts.append(f"<text {text}>{ratio:.2f}</text>")
    return parts


def _styles(names: Iterable[str]) -> dict[str, tuple[str, str, str]]:
    """How each line is drawn: a library alike in all charts."""
    fixed = dict(zip([name for name in COLUMNS if name != "mpishare"], STYLES, strict=True))
    free = iter([fixed[name] for name in fixed if name not in names])
    return {name: fixed[name] if name in fixed else next(free) for name in names}


def _fastest(lines: dict[str, Line], names: Iterable[str]) -> Line:
    """The fastest row at each size, of some lines."""
    found: dict[int, dict] = {}
    for name in names:
        for row in lines.get(name, ()):
            best = found.setdefault(row["nbytes"], row)
            if row["median_us"] < best["median_us"]:
                found[row["nbytes"]] = row
    return [found[nbytes] for nbytes in sorted(found)]


def _apart(every: list[int], x: Callable[[float], float]) -> list[int]:
    """The sizes whose names have room, the last one always."""
    kept = [every[-1]]
    for nbytes in every[:-1]:
        if x(every[-1]) - x(nbytes) > SPACE and (len(kept) < 2 or x(nbytes) - x(kept[-1]) > SPACE):
            kept.append(nbytes)
    return kept


def _time(power: int) -> str:
    return next(
        f"{10 ** (power - of):g} {unit}"
        for unit, of in (("s", 6), ("ms", 3), ("µs", 0), ("ns", -3))
        if power >= of
    )


def _span(line: Line) -> str:
    """The first and the last time of a line."""
    return f"{us(line[0]['median_us'])} to {us(line[-1]['median_us'])} µs"

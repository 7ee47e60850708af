"""Whole steps: a table of their time over the ranks, a figure of what host and GPU do in them."""

from pathlib import Path

from figure import HEAD
from others import lines_of
from tables import table, us

#: How the faces of a step go, by the option of the program.
WAYS = {
    None: "mpishare",
    "pinned": "staged through pinned memory",
}
#: The runs of a place begin with its name.
PLACES = {
    "steps-gpus": "heat in 256 x 256 x 256 cells, H200",
    "steps-host": "heat in 96 x 96 x 96 cells, a core per rank",
}
WIDTH, LEFT, LANE, GAP = 400, 36, 26, 12
#: Colors by what a span is.
COLORS = {
    "update": "#009E73",
    "exchange": "#0072B2",
    "faces out": "#D55E00",
    "messages, faces in": "#B8860B",
    "copy": "#CC79A7",
    "pack": "#808080",
}
TITLES = {"staged": "staged through pinned memory", "mpishare": "mpishare"}


def over_ranks(folder: Path) -> list[str]:
    """A table of the time of a step for each place."""
    rows, lines = lines_of(folder / "steps.jsonl"), []
    for name, title in PLACES.items():
        mine = [each for each in rows if each["run"].startswith(name)]
        times = {(each["ranks"], each["staged"]): each["step_us_median"] for each in mine}
        ways = {way: text for way, text in WAYS.items() if way in {of for _, of in times}}
        cells = [
            [str(ranks), *(us(times.get((ranks, way))) for way in ways)]
            for ranks in sorted({ranks for ranks, _ in times})
        ]
        lines += table([f"ranks: {title}", *(f"{text}, µs" for text in ways.values())], cells)
    return lines


def timeline(folder: Path) -> dict[str, str]:
    """The figure of what host and GPU do, one way below the other on one scale."""
    rows = [_settled(row) for row in lines_of(folder / "timeline.jsonl")]
    if not rows:
        return {}
    end = max(span[3] for row in rows for span in row["spans"])
    scale = (WIDTH - LEFT - 8) / end
    parts, y = [], 22
    for row in rows:
        parts.append(f'<text x="2" y="{y - 6}" font-weight="bold">{TITLES[row["way"]]}</text>')
        for lane, name in (("host", "host"), ("gpu", "GPU")):
            spans = [span[1:] for span in row["spans"] if span[0] == lane]
            parts += [f'<text x="2" y="{y + 17}">{name}</text>', *_lane(spans, y, scale)]
            y += LANE + 2
        y += GAP + 18
    step = next(n for n in (10, 20, 50, 100, 200, 500, 1000, 5000) if end / n <= 10)
    parts.append(f'<text x="2" y="{y}">µs</text>')
    for tick in range(0, int(end) + 1, step):
        at = LEFT + scale * tick
        parts.append(f'<text x="{at:.1f}" y="{y}" text-anchor="middle">{tick}</text>')
    parts += _legend({span[1] for row in rows for span in row["spans"]}, y + 12)
    title = f"{rows[0]['steps'] - 1} steps of Jacobi's method on two GPUs: what rank 0 does"
    head = HEAD.format(width=WIDTH, height=y + 46, title=title)
    return {"timeline": "\n".join([head, *parts, "</svg>", ""])}


def _settled(row: dict) -> dict:
    """The line without its first step, in which the ranks come from a barrier one by one."""
    first = row["spans"][0][:2]
    _, begin, *_ = (span[2] for span in row["spans"] if span[:2] == first)
    late = [span for span in row["spans"] if span[2] >= begin]
    return row | {"spans": [[*span[:2], span[2] - begin, span[3] - begin] for span in late]}


def _lane(spans: list, y: float, scale: float) -> list[str]:
    """The spans of the host or the GPU, on a line."""
    line = f"M{LEFT} {y + LANE}h{WIDTH - LEFT - 8}"
    parts = [f'<path d="{line}" stroke="currentColor" stroke-opacity=".3"/>']
    for what, start, stop in spans:
        at, wide = LEFT + scale * start, max(scale * (stop - start), 0.8)
        parts.append(
            f'<rect x="{at:.1f}" y="{y + 3}" width="{wide:.1f}" height="{LANE - 5}" '
            f'fill="{COLORS[what]}"><title>{what}</title></rect>'
        )
    return parts


def _legend(names: set[str], y: float) -> list[str]:
    """The colors, three a line."""
    parts = []
    for number, what in enumerate(name for name in COLORS if name in names):
        x, down = LEFT + number % 3 * 122, y + number // 3 * 18
        parts.append(f'<rect x="{x}" y="{down}" width="12" height="12" fill="{COLORS[what]}"/>')
        parts.append(f'<text x="{x + 16}" y="{down + 10}">{what}</text>')
    return parts

"""The figure of the README: the time of an exchange over the bytes of a face, as SVG."""

import math

from tables import size

CASE, CLOCK = "halo1d", "throughput"
WIDTH, HEIGHT = 560, 360
LEFT, RIGHT, TOP, BOTTOM = 84, 26, 44, 50
SPACE = 60  # between the names of two sizes
TICKS_US = (1, 10, 100, 1000, 10000, 100000)
FONT = 'font-family="Helvetica, Arial, sans-serif"'
#: Name, color and dashes of each line. The colors differ for color-blind readers too.
STAGED = ("staged through pinned host memory", "#666666", "2 4")
BEST = ("best of NCCL, NVSHMEM and PyTorch", "#D55E00", "8 4")
BY_HAND = ("a kernel by hand on NCCL's windows", "#009E73", "5 3")
OWN = ("mpishare, any array as a field", "#0072B2", "")

Line = list[tuple[int, float]]


def lines(rows: list[dict]) -> dict[tuple[str, str, str], Line]:
    """The points (bytes, microseconds) of each line, from the rows of a run."""
    rows = [row for row in rows if (row["case"], row["clock"], row["ok"]) == (CASE, CLOCK, True)]
    others = {row["arm"] for row in rows if row["kind"] == "rival"} - {"staged", "naive"}
    by_hand = {arm for arm in others if arm.startswith("nccl device")}

    def fastest(arms: set[str]) -> Line:
        times: dict[int, float] = {}
        for row in rows:
            if row["arm"] in arms:
                times[row["nbytes"]] = min(row["median_us"], times.get(row["nbytes"], math.inf))
        return sorted(times.items())

    found = {
        STAGED: fastest({"staged"}),
        BEST: fastest(others - by_hand),
        BY_HAND: fastest(by_hand),
        OWN: fastest({"private fields"}),
    }
    return {line: points for line, points in found.items() if points}


def svg(run: dict, title: str) -> str:
    """Draw them, with a label along each line."""
    found = lines(run["rows"])
    sizes = sorted({nbytes for line in found.values() for nbytes, _ in line})

    def x(nbytes: float) -> float:
        low, high = math.log(sizes[0]), math.log(sizes[-1])
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log(nbytes) - low) / (high - low)

    def y(us: float) -> float:
        low, high = math.log(TICKS_US[0]), math.log(TICKS_US[-1])
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (math.log(us) - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {FONT} '
        f'font-size="13" role="img"><title>{title}</title>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(LEFT, 24, title, size=15),
    ]
    for us in TICKS_US:
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(us):.1f}" y2="{y(us):.1f}" '
            'stroke="#dddddd"/>'
        )
        parts.append(_text(LEFT - 8, y(us) + 4, f"{us:,} µs", anchor="end"))
    for nbytes in sizes:
        if nbytes == sizes[-1] or x(sizes[-1]) - x(nbytes) > SPACE:
            parts.append(_text(x(nbytes), HEIGHT - 28, size(nbytes)))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "bytes of a face"))
    for (name, color, dashes), line in found.items():
        points = " ".join(f"{x(nbytes):.1f},{y(us):.1f}" for nbytes, us in line)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2.5" '
            f'stroke-dasharray="{dashes}"/>'
        )
        parts += [
            f'<circle cx="{x(nbytes):.1f}" cy="{y(us):.1f}" r="3.5" fill="{color}"/>'
            for nbytes, us in line
        ]
        label_y = y(line[0][1]) + {BY_HAND[0]: 15, OWN[0]: 29}.get(name, -9)
        parts.append(_text(LEFT + 10, label_y, name, anchor="start", fill=color))
    return "\n".join([*parts, "</svg>", ""])


def _text(
    x: float, y: float, words: str, *, anchor: str = "", fill: str = "#222222", size: int = 13
) -> str:
    anchor = anchor or ("start" if size > 13 else "middle")
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" '
        f'font-size="{size}">{words}</text>'
    )

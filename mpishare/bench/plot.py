"""The plot of a run: time over size, with quartiles, of mpishare and its fastest baselines."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from mpishare.bench.cases import CASES
from mpishare.bench.report import OWN, Row, size_text
from mpishare.errors import counted, grouped

#: Each line has a marker, and a color of a style that color-blind readers tell apart.
_STYLE, _MARKERS = "tableau-colorblind10", "osD^vx+*pP"
_WIDTH, _HEIGHT, _TITLE = 7.5, 3.0, 0.3  # inches: of a case, and of the title


def draw(file: Path, environment: dict[str, Any], rows: Sequence[Row]) -> None:
    """Draw the times back to back, in the format of the suffix; a run always gives the same SVG."""
    from matplotlib import style
    from matplotlib.figure import Figure

    cases = _cases(rows)
    gpus = [str(gpu["name"]) for gpu in environment["gpus"]]
    where = f"{len(gpus)} x {gpus[0]}" if gpus else counted(environment["cores"], "core")
    on = f"{counted(environment['ranks'], 'rank')} on {where}"
    title = f"mpishare bench: {on}, back to back, {environment['date'][:10]}"
    settings = {"svg.hashsalt": "mpishare", "font.size": 8, "lines.markersize": 5}
    with style.context([_STYLE, settings]):
        height = _HEIGHT * max(len(cases), 1) + _TITLE
        figure = Figure(figsize=(_WIDTH, height), dpi=150, layout="constrained")
        figure.suptitle(title, fontsize=8)
        for number, (name, found) in enumerate(cases.items(), 1):
            _draw_case(figure.add_subplot(len(cases), 1, number), name, found)
        if not cases:
            figure.text(0.5, 0.4, "no case ran at several sizes", ha="center")
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def _cases(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows to draw of each case that ran at several sizes."""
    timed = [row for row in rows if row.median_us and row.clock == "throughput"]
    cases = grouped((row.case, row) for row in timed if CASES[row.case].is_sized)
    return {name: of for name, of in cases.items() if len({row.nbytes for row in of}) > 1}


def _draw_case(panel: Any, case: str, rows: Sequence[Row]) -> None:
    """Draw the variants of mpishare, and each baseline that is the fastest at some size."""
    own = {row.arm: f"mpishare, {row.arm}" for row in rows if row.kind == OWN}
    arms = own | {row.fastest: row.fastest for row in rows if row.fastest}
    for (arm, label), marker in zip(arms.items(), cycle(_MARKERS), strict=False):
        line = marker + ("-" if arm in own else "--")
        panel.errorbar(*_points(rows, arm), fmt=line, label=label, fillstyle="none", capsize=2)
    sizes = sorted({row.nbytes for row in rows})
    panel.set(title=case, ylabel="us, with quartiles", yscale="log", xscale="log")
    panel.set_xticks(sizes, [size_text(each) for each in sizes])
    panel.yaxis.set_major_formatter("{x:g}")
    panel.minorticks_off()
    panel.grid(visible=True, which="major", linewidth=0.3)
    # Outside the panel: it covers no data.
    panel.legend(loc="upper left", bbox_to_anchor=(1.02, 1), frameon=False)


def _points(rows: Sequence[Row], arm: str) -> tuple[list[int], list[float], list[list[float]]]:
    """Return sizes, medians, and how far below and above them the quartiles are."""
    of_arm = sorted((row for row in rows if row.arm == arm), key=lambda row: row.nbytes)
    found = [(row.median_us or 0, *(row.quartiles_us or (0, 0))) for row in of_arm]
    errors = [[at - low for at, low, _ in found], [high - at for at, _, high in found]]
    return [row.nbytes for row in of_arm], [at for at, *_ in found], errors

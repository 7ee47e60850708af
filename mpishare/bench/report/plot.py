"""The plot of a run: time over size, a line per variant, and below it the ratios."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishare.bench.cases import CASES
from mpishare.bench.report.rows import CLOCKS, OWN
from mpishare.errors import format_nbytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mpishare.bench.report.rows import Clock, Row

_TITLES = {"latency": "a synchronize after each", "throughput": "back to back"}
_STYLES: dict[str, dict[str, Any]] = {
    "own": {"linewidth": 2.2, "marker": "o", "markersize": 4},
    "rival": {"linewidth": 1.1, "marker": ".", "markersize": 5},
    "ceiling": {"linewidth": 0.9, "linestyle": ":", "color": "0.45"},
}
_WIDTH, _HEIGHT = 5.5, 5.5  # inches per case and clock


def draw(file: Path, environment: dict[str, Any], rows: Sequence[Row]) -> None:
    """Draw the cases that run once for each size: a column per clock and two rows per case.

    The suffix of `file` is its format. The same run gives the same bytes of SVG.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    sizes: dict[str, set[int]] = {}
    for row in rows:
        sizes.setdefault(row.case, set()).update({row.nbytes} - {0})
    cases = [case for case in sizes if CASES[case].is_sized and len(sizes[case]) > 1]
    with mpl.rc_context({"svg.hashsalt": "mpishare", "font.size": 8}):
        figure = Figure(
            figsize=(_WIDTH * len(CLOCKS), _HEIGHT * max(len(cases), 1)), layout="constrained"
        )
        figure.suptitle(_title(environment))
        if cases:
            # A panel of ratios has half the height of the times above it.
            axes = figure.subplots(
                2 * len(cases), len(CLOCKS), squeeze=False, height_ratios=[2, 1] * len(cases)
            )
            for number, case in enumerate(cases):
                for column, clock in enumerate(CLOCKS):
                    found = [row for row in rows if (row.case, row.clock) == (case, clock)]
                    above, below = axes[2 * number][column], axes[2 * number + 1][column]
                    _draw_times(above, case, clock, found)
                    _draw_ratios(below, found)
        else:
            figure.text(0.5, 0.4, "no case ran at several sizes", ha="center")
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def _title(environment: dict[str, Any]) -> str:
    gpus = [str(gpu["name"]) for gpu in environment["gpus"]]
    where = f"{len(gpus)} x {gpus[0]}" if gpus else f"{environment['cores']} cores"
    return f"mpishare bench: {environment['ranks']} ranks on {where}, {environment['date'][:10]}"


def _by_variant(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each variant that has numbers, by size."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.median_us:
            found.setdefault(row.arm, []).append(row)
    return {name: sorted(each, key=lambda row: row.nbytes) for name, each in found.items()}


def _style(number: int, row: Row) -> dict[str, Any]:
    return {"color": f"C{number % 10}", **_STYLES[row.kind]}


def _draw_times(axes: Any, case: str, clock: Clock, rows: Sequence[Row]) -> None:
    from matplotlib.ticker import LogLocator

    for number, (name, found) in enumerate(_by_variant(rows).items()):
        sizes, times = [row.nbytes for row in found], [row.median_us for row in found]
        axes.plot(sizes, times, label=name, **_style(number, found[0]))
    axes.set_title(f"{case}: {_TITLES[clock]}")
    axes.set_ylabel("us, median of the maximum over ranks")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    _set_sizes(axes, rows)
    if axes.has_data():
        axes.legend(fontsize="small")


def _draw_ratios(axes: Any, rows: Sequence[Row]) -> None:
    for number, (name, found) in enumerate(_by_variant(rows).items()):
        ratios = [(row.nbytes, row.ratio) for row in found if row.kind == OWN and row.ratio]
        if ratios:
            axes.plot(*zip(*ratios, strict=True), label=name, **_style(number, found[0]))
    axes.axhline(1, color="0.3", linewidth=0.9)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("of the fastest rival")
    axes.set_xlabel("bytes of a face")
    _set_sizes(axes, rows)


def _set_sizes(axes: Any, rows: Sequence[Row]) -> None:
    sizes = sorted({row.nbytes for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [format_nbytes(nbytes) for nbytes in sizes], rotation=30)
    axes.minorticks_off()
    axes.grid(visible=True, which="major", linewidth=0.3)

"""The plot of a run: time and bandwidth over size, of mpishare, the best baseline and staged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishare.bench.cases import CASES
from mpishare.bench.report.rows import BASELINE, OWN
from mpishare.errors import counted, format_nbytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mpishare.bench.report.rows import Row

#: Colors that color-blind readers tell apart, after Okabe and Ito; each line has a marker too.
_OWN = (("#0072B2", "o"), ("#56B4E9", "s"), ("#009E73", "D"))
_BEST = {"color": "#D55E00", "marker": "^", "linestyle": "--", "label": "fastest baseline"}
_STAGED = {"color": "0.45", "marker": "x", "linestyle": ":", "label": "staged"}
_WIDTH, _HEIGHT, _TITLE = 7.5, 2.2, 0.3  # inches: of a case, and of the title


def draw(file: Path, environment: dict[str, Any], rows: Sequence[Row]) -> None:
    """Draw each case that ran at several sizes: the times and the bandwidths back to back.

    The suffix of `file` is its format. The same run gives the same bytes of SVG.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    cases: dict[str, list[Row]] = {}
    for row in rows:
        if row.median_us and row.clock == "throughput" and CASES[row.case].is_sized:
            cases.setdefault(row.case, []).append(row)
    cases = {name: of for name, of in cases.items() if len({row.nbytes for row in of}) > 1}
    gpus = [str(gpu["name"]) for gpu in environment["gpus"]]
    where = f"{len(gpus)} x {gpus[0]}" if gpus else counted(environment["cores"], "core")
    on = f"{counted(environment['ranks'], 'rank')} on {where}"
    with mpl.rc_context({"svg.hashsalt": "mpishare", "font.size": 8, "lines.markersize": 5}):
        height = _HEIGHT * max(len(cases), 1) + _TITLE
        figure = Figure(figsize=(_WIDTH, height), dpi=150, layout="constrained")
        figure.suptitle(
            f"mpishare bench: {on}, back to back, {environment['date'][:10]}", fontsize=8
        )
        if cases:
            panels = figure.subplots(len(cases), 2, squeeze=False)
            for (name, found), (times, rates) in zip(cases.items(), panels, strict=True):
                _draw_case(times, rates, name, found)
        else:
            figure.text(0.5, 0.4, "no case ran at several sizes", ha="center")
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def _draw_case(times: Any, rates: Any, case: str, rows: Sequence[Row]) -> None:
    from matplotlib.ticker import LogLocator

    own = dict.fromkeys(row.arm for row in rows if row.kind == OWN)
    lines = [
        ({"color": color, "marker": marker, "label": f"mpishare, {arm}"}, [arm])
        for arm, (color, marker) in zip(own, _OWN, strict=False)
    ]
    lines += [(_STAGED, ["staged"])] if any(row.arm == "staged" for row in rows) else []
    lines += [(_BEST, [row.arm for row in rows if row.kind == BASELINE])]
    sizes = sorted({row.nbytes for row in rows})
    places = {nbytes: place for place, nbytes in enumerate(sizes)}
    for style, arms in lines:
        found = [row for row in rows if row.arm in arms]
        fastest = [
            min((row for row in found if row.nbytes == nbytes), key=lambda row: row.median_us or 0)
            for nbytes in sorted({row.nbytes for row in found})
        ]
        at = [places[row.nbytes] for row in fastest]
        times.plot(at, [row.median_us for row in fastest], fillstyle="none", **style)
        rates.plot(at, [row.gb_per_s for row in fastest], fillstyle="none", **style)
    times.set(title=f"{case}: time", ylabel="us", yscale="log")
    times.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    times.yaxis.set_major_formatter("{x:g}")
    rates.set(title=f"{case}: bandwidth of a rank", ylabel="GB/s")
    rates.set_ylim(bottom=0)
    for axes in (times, rates):
        axes.set_xticks(range(len(sizes)), [format_nbytes(each) for each in sizes])
        axes.tick_params(axis="x", rotation=30)
        axes.minorticks_off()
        axes.grid(visible=True, which="major", linewidth=0.3)
    # Beside the panels: it covers no data.
    rates.legend(loc="upper left", bbox_to_anchor=(1.02, 1), frameon=False)

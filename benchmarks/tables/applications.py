"""The table of the applications: what the programs of scripts/applications printed with --json."""

import json
from pathlib import Path

from tables import RefusedError, table

ORDERS = ("plain", "last", "first", "beside")
HEADS = [
    *("application", "cells in all", "ranks", "step, µs"),
    *("step over max(interior, exchange) + shell", "efficiency", "exchange, µs"),
    "step over that with the fastest MPI",
    *("with pinned, times as long", "with naive, times as long"),
]


def lines(path: Path) -> list[str]:
    """The section of docs/results/README.md; nothing where there is no such file."""
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if any(each["checked"] is False for each in found):
        raise RefusedError(f"{path.name} has a wrong result in it")
    if not found:
        return []
    words = [
        "## Applications",
        "",
        "The programs of `scripts/applications`, as they print with `--json` (`--compare`,",
        "`--bench`, `--graph`), one rank per GPU. The step is that of the fastest order where",
        "several were timed: *plain* exchanges, then updates; *last* updates the shell last,",
        "*first* first, and *beside* on another stream. Efficiency is one rank alone, on as many",
        "cells, over all.",
        "In the last two columns above 1 mpishare is faster. In the one before them it is below 1:",
        "the step over that with the fastest of `Sendrecv`, `Isend` and `Irecv` of packed faces,",
        "persistent requests and neighborhood collectives, timed in turns (`--compare`).",
        "",
    ]
    rows = []
    for each in found:
        cells = " x ".join(str(n * d) for n, d in zip(each["cells"], each["dims"], strict=True))
        steps = {name: each[f"{name}_us"] for name in ORDERS if f"{name}_us" in each}
        best = min(steps, key=steps.__getitem__, default=None)
        step = f"{steps[best]:.4g} ({best})" if best else f"{each['step_us_median']:.4g}"
        name = each["program"] + " --wrap" * bool(each.get("wrap")) + " --graph" * each["graph"]
        with_mpi = f" ({each['mpi']})" if "mpi" in each and not each["gpu"] else ""
        rows.append(
            [
                name,
                cells,
                f"{each['ranks']} on {each['gpu'] or 'CPU cores'}{with_mpi}, {each['date'][:10]}",
                step,
                _figure(each.get("step_with_overlap_to_best"), ".2f"),
                _figure(each.get(f"{best}_efficiency"), ".2f"),
                _figure(each["exchange_us_median"], ".3g"),
                _figure(each.get("step_to_fastest_mpi"), ".2f"),
                _figure(each.get("pinned_exchange_to_mpishare"), ".1f"),
                _figure(each.get("naive_exchange_to_mpishare"), ".1f"),
            ]
        )
    return [*words, *table(HEADS, rows)]


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)

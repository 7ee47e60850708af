"""The tables of the newest libraries, of solves, JAX and applications."""

import json
from collections.abc import Iterable
from pathlib import Path

from tables import Case, RefusedError, by_size, over, pair, ratios, size, table, us

#: The arms of each column: called or in a graph, with faces packed or sent from where they are.
COLUMNS = {
    "mpishare": ("window fields", "private fields", "window pairwise", "window fence"),
    "staged MPI": ("staged", "staged persistent", "staged alltoallw"),
    "CUDA-aware MPI": ("mpi",),
    "NCCL send and receive": ("nccl", "nccl graph", "nccl windows"),
    "NCCL put and signal": ("nccl put", "nccl put graph", "nccl put in place"),
    "NCCL in a kernel": ("nccl device", "nccl device graph", "nccl device in place"),
    "NVSHMEM": ("nvshmem", "nvshmem graph", "nvshmem in place"),
    "PyTorch symmetric memory": ("torch", "torch graph", "torch in place"),
}
OVER_FASTEST = "mpishare over the fastest"
EXCHANGES = {"halo1d": "1-D halo", "halo3d": "3-D halo, six faces", "ring": "two faces, in a ring"}
#: The arms of each column of the sums: called, in a graph, and twenty in one.
SUMS = {
    name: (arm, f"{arm} graph", f"{arm} graph of 20")
    for name, arm in {
        "mpishare": "reduce",
        "NCCL": "nccl",
        "NCCL in a window": "nccl4py",
        "NVSHMEM": "nvshmem",
        "PyTorch symmetric memory": "torch",
        "staged MPI": "staged",
        "through a float": "float",
    }.items()
}
#: The cases of redistributions.
SPREADS = {
    "redistribute": "n³ complex128, first to second axis",
    "permuted": "the same, axes in the order 1, 2, 0",
    "allgather": "all-gather, per rank",
}
#: The ways of the cases of two ranks: the first word of their arms, and what columns call them.
KERNELS = {
    "kernel": "mpishare",
    "nvshmem": "NVSHMEM",
    "nccl": "NCCL's windows",
    "halo": "`HaloExchange`",
    "fence": "copy, `fence`",
    "post": "`post` .. `wait`",
}
IN_GRAPH = "graph of 20"
BY_HAND = ("fence", "post")  # in no graph
SOLVES = {
    "kernels": "the kernels alone, each rank in its own box",
    "graph": "mpishare, graphs of 50 iterations",
    "one graph": "mpishare, one graph per solve",
    "calls": "mpishare, kernel by kernel",
    "calls, dot": "mpishare, kernel by kernel, both products by `Allreduce.dot`",
    "nccl graph": "NCCL, graphs of 50 iterations",
    "nccl graph beside": "NCCL, graphs of 50 iterations, its exchange beside a kernel",
    "nccl": "NCCL, kernel by kernel",
    "nccl beside": "NCCL, kernel by kernel, its exchange beside a kernel",
    "staged": "MPI through pinned memory",
}
CALLS_OF_NCCL = ("nccl", "nccl beside")
#: The forms of the program of the case jax.
FORMS = ("loop", "recorded", "unrolled", "padded")
NBYTES_OF_ROW = 64  # in the case rows
#: The orders of a step of an application, and the columns of figures, with their formats.
ORDERS = ("plain", "last", "first", "beside")
FIGURES = {
    "step over max(interior, exchange) + shell": ("step_with_overlap_to_best", ".2f"),
    "efficiency": ("{}_efficiency", ".2f"),  # of the fastest order
    "exchange, µs": ("exchange_us_median", ".3g"),
    "step over that with the fastest MPI": ("step_to_fastest_mpi", ".2f"),
    "exchange with pinned, times as long": ("pinned_exchange_to_mpishare", ".1f"),
    "exchange with naive, times as long": ("naive_exchange_to_mpishare", ".1f"),
}


def newest(rows: list[dict]) -> list[str]:
    """The lines of all tables of a run, and why a baseline has no times."""
    lines = [line for case in EXCHANGES for line in _exchanges(rows, case)]
    return [*lines, *_sums(rows), *_setups(rows), *_absent(rows)]


def compared(rows: list[dict]) -> list[str]:
    """A line per library: a 1-D halo, back to back, the fastest form at each size."""
    case = Case(rows, "halo1d")
    # Without NCCL or another MPI beside it, a run compares nothing.
    if not {"mpi", "nccl"} & {*case.ran}:
        return []
    cells = []
    for name, forms in COLUMNS.items():
        times = [case.back(nbytes, *forms) for nbytes in case.sizes]
        if any(times):
            cells.append([name, *map(us, times)])
    return table(["back to back, µs", *map(size, case.sizes)], cells)


def _exchanges(rows: list[dict], name: str) -> list[str]:
    """A line per size: with a synchronize after each exchange / back to back."""
    case = Case(rows, name)
    arms = {name: arms for name, arms in COLUMNS.items() if {*case.ran} & {*arms}}
    columns = {name: lambda n, arms=arms: pair(case.best(n, arms)) for name, arms in arms.items()}
    columns[OVER_FASTEST] = lambda n: ratios(*(case.best(n, each) for each in arms.values()))
    return by_size(EXCHANGES[name], case, columns)


def _sums(rows: list[dict]) -> list[str]:
    """A line per size, back to back: called / in a graph / a twentieth of a graph of twenty."""
    case = Case(rows, "allreduce")
    forms = {name: arms for name, arms in SUMS.items() if arms[0] in case.ran}

    def times(nbytes: int, arms: Iterable[str]) -> list[float | None]:
        return [case.back(nbytes, arm) for arm in arms]

    columns = {
        name: lambda n, arms=arms: pair(filter(None, times(n, arms))) or "-"
        for name, arms in forms.items()
    }
    columns[OVER_FASTEST] = lambda n: ratios(*(times(n, arms) for arms in forms.values()))
    columns["complex128, called"] = lambda n: us(case.back(n, "complex128"))
    return by_size("sum over all ranks", case, columns)


def _setups(rows: list[dict]) -> list[str]:
    times = Case(rows, "setup").times
    cells = [[arm, f"{time / 1e3:.3g}"] for (_, arm, _), time in times.items()]
    return table(["made on an existing node, but for `Node`", "ms"], cells)


def redistributed(rows: list[dict]) -> list[str]:
    """A line per size: all forms, with a synchronize after each / back to back."""
    lines: list[str] = []
    for name, text in SPREADS.items():
        case = Case(rows, name)
        mine, others = case.arms("own"), case.arms("rival")
        extents = {row["nbytes"]: row["n"] for row in case.rows}
        cells = []
        for nbytes in case.sizes:
            times = [pair(case.best(nbytes, [arm])) for arm in (*mine, *others)]
            n = f", n = {extents[nbytes]}" if extents[nbytes] else ""
            over_fastest = ratios(case.best(nbytes, mine), case.best(nbytes, others))
            cells.append([size(nbytes) + n, *times, over_fastest])
        heads = [text, *(f"mpishare, {arm}" for arm in mine), *others, OVER_FASTEST]
        lines += table(heads, cells)
    return [*lines, *_absent(rows)]


def moved(rows: list[dict]) -> list[str]:
    """A line per arm, back to back: of mpishare with the ratio to the fastest of the others."""
    case = Case(rows, "rows")
    own, others, cells = case.arms("own"), case.arms("rival"), []
    for arm in case.ran:
        of_goals = [each for each in others if each.startswith("migrate")]
        found = of_goals if arm.startswith("migrate") and of_goals else {*others} - {*of_goals}
        beside = found if arm in own else ()
        times = [(case.back(n, arm), case.back(n, *beside)) for n in case.sizes]
        ratios = [f" ({over(time, [other])})" if other else "" for time, other in times]
        cells.append(
            [arm, *(us(time) + ratio for (time, _), ratio in zip(times, ratios, strict=True))]
        )
    heads = (f"{nbytes // NBYTES_OF_ROW:,} rows" for nbytes in case.sizes)
    return [*table(["back to back, µs", *heads], cells), *_absent(rows)]


def _absent(rows: list[dict]) -> list[str]:
    """What was not timed, and why: a line per library and reason, with the sizes of wrong sums."""
    names = {arm: name for columns in (SUMS, COLUMNS) for name in columns for arm in columns[name]}
    found: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        if row["kind"] == "rival" and not row["ok"]:
            # A reason begins with the name that the bench has for the library.
            why = "" if row["wrong"] else row["reason"].partition(": ")[2] or row["reason"]
            name = names.get(row["arm"]) or KERNELS.get(_way(row["arm"]), row["arm"])
            found.setdefault((name, why), []).append(row)
    lines = []
    for (name, why), failed in found.items():
        failing = ", ".join(size(n) for n in sorted({row["nbytes"] for row in failed}))
        what = "sums" if {row["case"] for row in failed} == {"allreduce"} else "results"
        where = " in sums" if what == "sums" else ""
        lines.append(
            f"- {name} was not timed{where}: {why}"
            if why
            else f"- {name} gave wrong {what} of {failing}, and was not timed there"
        )
    return [*lines, *[""] * bool(lines)]


def kernels(rows: list[dict]) -> list[str]:
    """Kernels of two ranks that give each other words, beside others."""
    return [*_swaps(rows), *_absent(rows)]


def _way(arm: str) -> str:
    return arm.split()[0].rstrip(",")


def _swaps(rows: list[dict]) -> list[str]:
    """A line per size, back to back: called / a twentieth of a graph of twenty.

    Of several numbers of blocks the fastest counts.
    """
    case = Case(rows, "swap")
    cells = []
    for nbytes in case.sizes:
        times: dict[str, list[float | None]] = {}
        for way in KERNELS:
            ran = [arm for arm in case.ran if _way(arm) == way]
            times[way] = [
                case.back(nbytes, *(arm for arm in ran if arm.endswith(IN_GRAPH) == is_graph))
                for is_graph in (False, True)
            ]
        own, halo = times["kernel"], times["halo"]
        words = [pair(each[: 1 + (way not in BY_HAND)]) for way, each in times.items()]
        rates = [nbytes / each[1] / 1e3 if each[1] else None for each in (own, halo)]
        beside = ratios(own, times["nvshmem"]), ratios(own, times["nccl"])
        by_hand = min(filter(None, (times[way][0] for way in BY_HAND)), default=None)
        beside += (over(by_hand, times["nccl"]),)
        cells.append([size(nbytes), *words, *beside, pair(rates)])
    heads = ["both ways, µs", *KERNELS.values(), "mpishare over NVSHMEM", "over NCCL's"]
    heads += ["windows by hand over NCCL's", "GB/s, mpishare / halo"]
    return table(heads, cells)


def solves(rows: list[dict]) -> list[str]:
    """The iteration of conjugate gradients, by each way to link the ranks."""
    found = Case(rows, "cg").by_arm()
    called = [found.get(arm) for arm in CALLS_OF_NCCL]
    cells = [
        [text, us(found[arm]), over(found[arm], [found.get("kernels")]), over(found[arm], called)]
        for arm, text in SOLVES.items()
        if arm in found
    ]
    heads = ["an iteration", "µs", "of the kernels alone", "of the fastest calls of NCCL"]
    return table(heads, cells)


def jax(rows: list[dict]) -> list[str]:
    """A step with an exchange, and the same without it."""
    case = Case(rows, "jax")
    heads = [
        "faces",
        "step",
        "with exchange, µs",
        "without, µs",
        "difference",
        "exchange called, µs",
    ]
    cells = []
    for nbytes in case.sizes:
        for form in FORMS:
            step, alone = case.back(nbytes, form), case.back(nbytes, f"{form} alone")
            line = [size(nbytes), form, us(step), us(alone), us(step - alone)]
            cells.append([*line, us(case.back(nbytes, "exchange called"))])
    return table(heads, cells)


def lines_of(path: Path) -> list[dict]:
    """What a program printed, a line of JSON each; nothing where there is no such file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


#: What a node takes, by the name of its column: the unit, and the task of rank_counts.py.
LIFE = {
    "`Node()`, ms": ("ms", "node"),
    "a window, ms": ("ms", "window"),
    "a plan, ms": ("ms", "plan"),
    "`close()`, ms": ("ms", "close"),
    "`MPI.Win.Allocate_shared`, ms": ("ms", "MPI_Win_allocate_shared"),
    "fence, µs": ("us", "fence"),
    "`Barrier`, µs": ("us", "MPI_Barrier"),
    "exchange, µs": ("us", "exchange"),
    "`Sendrecv`, µs": ("us", "MPI_Sendrecv"),
    "maximum, µs": ("us", "maximum"),
    "`Allreduce`, µs": ("us", "MPI_Allreduce"),
}


def counts(path: Path) -> list[str]:
    """A row per number of ranks: lines of rank_counts.py."""
    rows = []
    for each in lines_of(path):
        times = [us(each[unit][task]) for unit, task in LIFE.values()]
        rows.append([str(each["ranks"]), *times, us(each["private_mib"]), us(each["shared_mib"])])
    return table(["ranks", *LIFE, "MiB per rank", "MiB in /dev/shm"], rows)


def applications(path: Path) -> list[str]:
    """What the programs of scripts/applications printed with --json."""
    found = lines_of(path)
    if any(each["checked"] is False for each in found):
        raise RefusedError(f"{path.name} has a wrong result in it")
    rows = []
    for each in found:
        cells = " x ".join(str(n * d) for n, d in zip(each["cells"], each["dims"], strict=True))
        steps = {name: each[f"{name}_us"] for name in ORDERS if f"{name}_us" in each}
        best = min(steps, key=steps.__getitem__, default=None)
        step = f"{steps[best]:.4g} ({best})" if best else f"{each['step_us_median']:.4g}"
        name = each["program"] + " --wrap" * bool(each.get("wrap")) + " --graph" * each["graph"]
        with_mpi = f" ({each['mpi']})" if "mpi" in each and not each["gpu"] else ""
        place = f"{each['ranks']} on {each['gpu'] or 'CPU cores'}{with_mpi}, {each['date'][:10]}"
        figures = [(each.get(key.format(best)), form) for key, form in FIGURES.values()]
        texts = ["" if figure is None else format(figure, form) for figure, form in figures]
        rows.append([name, cells, place, step, *texts, _in_turns(each)])
    columns = ["application", "cells in all", "ranks", "step, µs", *FIGURES, "steps in turns, µs"]
    return table(columns, rows)


def _in_turns(run: dict) -> str:
    """The step with mpishare, pinned and naive, each in its faster order."""
    orders = "{}_step_us", "{}_step_without_overlap_us"
    steps = [
        [run[key] for order in orders if (key := order.format(name)) in run]
        for name in ("mpishare", "pinned", "naive")
    ]
    return ", ".join(f"{min(each):.3g}" for each in steps if each)

"""The tables of runs beside the newest libraries: the time of each in its fastest form."""

from tables import CLOCKS, medians, over, pair, size, sizes, table, us

#: The arms of each column: called or in a graph, with faces packed or sent from where they are.
COLUMNS = {
    "mpishare": ("window fields", "private fields", "window pairwise", "window fence"),
    "staged MPI": ("staged", "staged persistent"),
    "CUDA-aware MPI": ("mpi",),
    "NCCL send and receive": ("nccl", "nccl graph", "nccl windows"),
    "NCCL put and signal": ("nccl put", "nccl put graph", "nccl put in place"),
    "NCCL in a kernel": ("nccl device", "nccl device graph", "nccl device in place"),
    "NVSHMEM": ("nvshmem", "nvshmem graph", "nvshmem in place"),
    "PyTorch symmetric memory": ("torch", "torch graph", "torch in place"),
}
EXCHANGES = {"halo1d": "1-D halo", "ring": "two faces, in a ring"}
#: The arms of each column of the sums: called, in a graph, and twenty in one.
_FORMS = ("{}", "{} graph", "{} graph of 20")
SUMS = {
    name: tuple(form.format(arm) for form in _FORMS)
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


def exchanges(rows: list[dict], case: str) -> list[str]:
    """A line per size: with a synchronize after each exchange / back to back."""
    found = medians(rows, case)
    arms = {arm for _, arm, _ in found}
    columns = {name: each for name, each in COLUMNS.items() if arms & {*each}}

    def fastest(nbytes: int, arms: tuple[str, ...], clock: str) -> float | None:
        times = [found.get((nbytes, arm, clock)) for arm in arms]
        return min((time for time in times if time is not None), default=None)

    cells = []
    for nbytes in sizes(found):
        times = [[fastest(nbytes, each, clock) for clock in CLOCKS] for each in columns.values()]
        cells.append([size(nbytes), *map(pair, times), ratios(times)])
    heads = [EXCHANGES[case], *columns, "mpishare over the fastest"]
    return table(heads, cells) if cells else []


def ratios(times: list[list[float | None]]) -> str:
    """The ratios of the first times to the fastest of the others."""
    mine, *others = times
    return " / ".join(over(time, [each[n] for each in others]) for n, time in enumerate(mine))


def sums(rows: list[dict]) -> list[str]:
    """A line per size, back to back: called / in a graph / a twentieth of a graph of twenty."""
    found = {
        key[:2]: time for key, time in medians(rows, "allreduce").items() if key[2] == CLOCKS[1]
    }
    arms = {arm for _, arm in found}
    columns = {name: each for name, each in SUMS.items() if each[0] in arms}
    cells = []
    for nbytes in sizes(found):
        times = [[found.get((nbytes, arm)) for arm in each] for each in columns.values()]
        words = [pair(filter(None, each)) or "-" for each in times]
        complex_us = us(found.get((nbytes, "complex128")))
        cells.append([size(nbytes), *words, ratios(times), complex_us])
    heads = ["sum over all ranks", *columns, "mpishare over the fastest", "complex128, called"]
    return table(heads, cells) if cells else []


def dots(rows: list[dict]) -> list[str]:
    """A sentence: a dot product of 2^20 numbers, and the same without the other ranks."""
    found = {
        arm: time for (_, arm, clock), time in medians(rows, "dot").items() if clock == CLOCKS[1]
    }
    if not found:
        return []
    arms = "dot", "dot of one rank", "local dot", "vdot and allreduce"
    own, alone, local, mpi = (us(found.get(arm)) for arm in arms)
    return [
        f"`Allreduce.dot` of 2^20 float64 per rank, back to back: {own} µs, of one rank {alone};",
        f"`cupy.vdot` of the rank's own {local}, and with `MPI_Allreduce` behind it {mpi}.",
        "",
    ]


def setups(rows: list[dict]) -> list[str]:
    """How long it takes to make things."""
    found = {arm: time / 1e3 for (_, arm, _), time in medians(rows, "setup").items()}
    cells = [[arm, f"{ms:.3g}"] for arm, ms in found.items()]
    return table(["made on an existing node, but for `Node`", "ms"], cells) if cells else []


def solves(rows: list[dict]) -> list[str]:
    """The iteration of conjugate gradients, by each way to link the ranks."""
    found = {arm: time for (_, arm, _), time in medians(rows, "cg").items()}
    called = [found.get(arm) for arm in CALLS_OF_NCCL]
    cells = [
        [text, us(found[arm]), over(found[arm], [found.get("kernels")]), over(found[arm], called)]
        for arm, text in SOLVES.items()
        if arm in found
    ]
    heads = ["an iteration", "µs", "of the kernels alone", "of the fastest calls of NCCL"]
    return table(heads, cells) if cells else []


def library(arm: str) -> str:
    """The column of an arm."""
    columns = [*COLUMNS.items(), *SUMS.items()]
    return next((name for name, arms in columns if arm in arms), arm)


def absent(rows: list[dict]) -> list[str]:
    """What was not timed, and why: a line per library and reason, with the sizes of wrong sums."""
    found: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        if row["kind"] == "rival" and not row["ok"]:
            # A reason begins with the name that the bench has for the library.
            why = "" if row["wrong"] else row["reason"].partition(": ")[2] or row["reason"]
            found.setdefault((library(row["arm"]), why), []).append(row)
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
    return lines


def newest(rows: list[dict]) -> list[str]:
    """The lines of all tables of a run, and why a baseline has no times."""
    lines = [line for case in EXCHANGES for line in exchanges(rows, case)]
    missing = absent(rows)
    return [*lines, *sums(rows), *dots(rows), *setups(rows), *missing, *[""] * bool(missing)]

"""The tables of runs with a core per rank: a column for each MPI and number of ranks."""

from tables import size, table, us

CLOCK = "throughput"
HALOS = {"halo1d": "1-D", "halo3d": "3-D"}
FRESH = "sendrecv fresh"
#: What is compared with which forms of MPI: None is all that ran.
KINDS = {
    "in windows": ("window fields", None),
    "private": ("private fields", None),
    "fresh": ("fresh fields", FRESH),
}
ORDERS = {"`Window.fence`": "fence", "`Node.barrier`": "node.barrier"}
#: The faces in the table of the README, and its columns.
BRIEF_SIZES = (8, 4 << 10, 64 << 10, 1 << 20)
BRIEF_RANKS = (8, 32)
MPIS = ("MPICH", "Open MPI")

Run = dict  # the JSON of one


def name_of(run: Run) -> tuple[str, int]:
    """The MPI and the number of ranks of a run."""
    library = run["header"]["mpi_library"]
    return next(name for name in MPIS if library.startswith(name)), run["header"]["ranks"]


def best(run: Run, case: str, nbytes: int, arm: str, rival: str | None) -> tuple | None:
    """The time of an arm in microseconds and its ratio to a baseline, None: the fastest.

    Nothing where the run has no such size.
    """
    times = {"own": {}, "rival": {}}
    for row in run["rows"]:
        if (row["case"], row["nbytes"], row["clock"], row["ok"]) == (case, nbytes, CLOCK, True):
            times[row["kind"]][row["arm"]] = row["median_us"]
    mine, rivals = times["own"], times["rival"]
    if not mine:
        return None
    return mine[arm], mine[arm] / (min(rivals.values()) if rival is None else rivals[rival])


def sizes_of(runs: list[Run], case: str) -> list[int]:
    rows = [row for run in runs for row in run["rows"]]
    return sorted({row["nbytes"] for row in rows if row["case"] == case and row["ok"]})


def heads_of(runs: list[Run]) -> list[str]:
    return [f"{mpi}, {ranks} ranks" for mpi, ranks in map(name_of, runs)]


def in_full(runs: list[Run]) -> list[str]:
    """Every size and kind of fields: microseconds, and the ratio to the fastest form of MPI."""

    def cells(case: str, nbytes: int, arm: str, rival: str | None) -> list[str]:
        found = [best(run, case, nbytes, arm, rival) for run in runs]
        return [f"{us(each[0])} ({each[1]:.2f})" if each else "-" for each in found]

    lines, heads = [], heads_of(runs)
    for case, axes in HALOS.items():
        found = [
            [size(nbytes), kind, *cells(case, nbytes, *arms)]
            for nbytes in sizes_of(runs, case)
            for kind, arms in KINDS.items()
        ]
        lines += table([f"{axes} halo", "fields", *heads], found)
    if all(sizes_of([run], "fence") for run in runs):
        found = [[name, *cells("fence", 0, arm, None)] for name, arm in ORDERS.items()]
        lines += table(["all ranks ordered, over `MPI_Barrier`", *heads], found)
    return lines


def in_brief(runs: list[Run]) -> list[str]:
    """A line per case and size, with the ratios of the three kinds of fields."""
    runs = [run for run in runs if name_of(run)[1] in BRIEF_RANKS]
    if not runs:
        return []
    cells = []
    for case, axes in HALOS.items():
        for nbytes in BRIEF_SIZES:
            near = [n for n in sizes_of(runs, case) if nbytes <= 1.25 * n and n <= 1.25 * nbytes]
            if not near:
                continue
            line = [f"{size(nbytes)}, {axes}"]
            for run in runs:
                found = [best(run, case, near[0], *arms) for arms in KINDS.values()]
                line.append(" / ".join(f"{each[1]:.2f}" if each else "-" for each in found))
            cells.append(line)
    return table(["faces", *heads_of(runs)], cells)

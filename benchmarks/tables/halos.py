"""The tables of exchanges without GPUs, by messages, and of arrays that are new."""

from itertools import product

from tables import Case, by_size, cpu, pair, ratios, size, table, us, when

CASES = {"halo1d": "1-D halo", "halo3d": "3-D halo, six faces"}
MESSAGES = {"messages1d": "Slabs, two faces", "messages3d": "Blocks, six faces"}
#: Of runs over several nodes: the heading, what a size is, and the arms of mpishare.
NODES = {
    "messages1d": (MESSAGES["messages1d"] + " per rank", "faces", "by nccl"),
    "messages3d": (MESSAGES["messages3d"] + " per rank", "faces", "by nccl"),
    "redistribute": ("n³ complex128, first to second axis", "of a rank", "private"),
    "allreduce": ("Sums of float64", "array", "reduce"),
}

#: The arms of each way that messages go, and of the calls by hand.
WAYS = {
    "MPI": ("messages", "mpi"),
    "NCCL": ("by nccl", "nccl"),
    "NCCL in a graph": ("by nccl graph", "nccl graph"),
    "MPI through the host": ("through the host", ""),
}

#: Of a core per rank: which fields are compared with the fastest form of MPI.
KINDS = {"in windows": "window fields", "private": "private fields"}
ORDERS = {"`Window.fence`": "fence", "`Node.barrier`": "node.barrier"}
#: The faces in the brief table, and its columns.
BRIEF_SIZES = (8, 4 << 10, 64 << 10, 1 << 20)
BRIEF_RANKS = (8, 32)
MPIS = ("MPICH", "Open MPI")

Run = dict  # the JSON of one


def _beside(case: Case, columns: dict[str, tuple[str, ...]], head: str = "faces") -> list[str]:
    """A line per size: the times of an arm on both clocks, or their ratios to a second one."""

    def cell(nbytes: int, arm: str, *others: str) -> str:
        times = case.best(nbytes, [arm])
        return ratios(times, case.best(nbytes, others)) if others else pair(times)

    cells = {name: lambda n, arms=arms: cell(n, *arms) for name, arms in columns.items()}
    return by_size(head, case, cells)


def nodes(rows: list[dict]) -> list[str]:
    """What goes to another node by NCCL, beside NCCL and MPI by hand; both clocks."""
    lines = []
    for name, (text, head, arm) in NODES.items():
        columns = {
            "called, µs": (arm,),
            "of NCCL by hand": (arm, "nccl"),
            "of MPI through pinned memory": (arm, "staged"),
            "in a graph, µs": (f"{arm} graph",),
            "of a graph by hand": (f"{arm} graph", "nccl graph"),
            "each of 20 in a graph, µs": (f"{arm} graph of 20",),
        }
        cells = _beside(Case(rows, name), columns, head)
        lines += [f"{text}:", "", *cells] if cells else []
    return lines


def fresh(rows: list[dict]) -> list[str]:
    """Arrays that are new at each call, beside kept ones and messages; both clocks."""
    case = Case(rows, "fresh")
    messages = next(arm for arm in case.ran if arm in ("staged", "sendrecv"))
    columns = {
        "new arrays, µs": ("new arrays",),
        "of kept, copied": ("new arrays", "kept, copied"),
        f"of {messages}": ("new arrays", messages),
        "arrays in turn, µs": ("arrays in turn",),
        "of kept array": ("arrays in turn", "kept array"),
    }
    return _beside(case, columns)


def messages(rows: list[dict]) -> list[str]:
    """Messages as to another node, each way beside the same calls by hand; both clocks."""
    lines = []
    for name, text in MESSAGES.items():
        case, columns = Case(rows, name), {}
        for way, (own, by_hand) in WAYS.items():
            if own in case.ran:
                columns[f"{way}, µs"] = (own,)
            if by_hand in case.ran:
                columns[f"of {way} by hand"] = own, by_hand
        lines += [f"{text} per rank:", "", *_beside(case, columns)]
    return lines


def on_machine(found: list[Run]) -> list[str]:
    """On what runs with a core per rank are; all on one machine."""
    header = found[0]["header"]
    bound = ", each rank bound to one" if header["cores_per_rank"] == 1 else ""
    cores = f"{header['cores_of_machine']} cores ({cpu(header)}){bound}"
    return [f"Without a GPU, {cores}; {when(header)}.", ""]


def _name(run: Run) -> tuple[str, int]:
    """The MPI and the number of ranks of a run."""
    library = run["header"]["mpi_library"]
    return next(name for name in MPIS if library.startswith(name)), run["header"]["ranks"]


def _heads(found: list[Run]) -> list[str]:
    return ["{}, {} ranks".format(*_name(run)) for run in found]


def _best(case: Case, nbytes: int, arm: str) -> tuple[float, float] | None:
    """The time of an arm back to back, and its ratio to the fastest baseline.

    Nothing where the run has no such size.
    """
    time = case.back(nbytes, arm)
    return time and (time, time / case.back(nbytes, *case.arms("rival")))


def cores_in_full(found: list[Run]) -> list[str]:
    """Every size and kind of fields: microseconds, and the ratio to the fastest form of MPI."""

    def lines_of(name: str, arms: dict[str, str]) -> list[list[str]]:
        cases = [Case(run["rows"], name) for run in found]
        lines = []
        for nbytes, (text, arm) in product(_sizes(cases), arms.items()):
            bests = [_best(case, nbytes, arm) for case in cases]
            cells = [f"{us(best[0])} ({best[1]:.2f})" if best else "-" for best in bests]
            head = [size(nbytes), text] if nbytes else [text]
            lines.append([*head, *cells])
        return lines

    lines, heads = [], _heads(found)
    for name in ("halo1d", "halo3d"):
        lines += table([CASES[name].partition(",")[0], "fields", *heads], lines_of(name, KINDS))
    if all(Case(run["rows"], "fence").rows for run in found):
        fences = lines_of("fence", ORDERS)
        lines += table(["all ranks ordered, over `MPI_Barrier`", *heads], fences)
    return lines


def _sizes(cases: list[Case]) -> list[int]:
    return sorted({nbytes for case in cases for nbytes in case.sizes})


def cores_in_brief(found: list[Run]) -> list[str]:
    """A line per case and size, with the ratios of the three kinds of fields."""
    found = [run for run in found if _name(run)[1] in BRIEF_RANKS]
    cells = []
    for name, nbytes in product(("halo1d", "halo3d"), BRIEF_SIZES):
        cases = [Case(run["rows"], name) for run in found]
        near = [n for n in _sizes(cases) if nbytes <= 1.25 * n and n <= 1.25 * nbytes]
        if near:
            line = [f"{size(nbytes)}, {CASES[name][:3]}"]
            for case in cases:
                best = [_best(case, near[0], arm) for arm in KINDS.values()]
                line.append(" / ".join(f"{each[1]:.2f}" if each else "-" for each in best))
            cells.append(line)
    return table(["faces", *_heads(found)], cells)

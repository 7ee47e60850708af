"""The tables of exchanges: a line per size, the time of mpishare, and its ratios to others."""

from itertools import product

from tables import (
    CLOCKS,
    RefusedError,
    Times,
    arms,
    cpu,
    fastest,
    medians,
    on_clock,
    pair,
    ratios,
    size,
    sizes,
    table,
    us,
    when,
)

#: The cases that are shown; the files have all.
CASES = {
    "halo1d": "1-D halo",
    "halo3d": "3-D halo, six faces",
    "ring": "two faces, in a ring",
    "faces": "faces across the last axis",
}
#: Rows of their own: fields in windows are the other arms of mpishare.
FIELDS = {"private fields": "private", "fresh fields": "fresh"}
MESSAGES = {"messages1d": "Slabs, two faces", "messages3d": "Blocks, six faces"}

#: Of a core per rank: which fields are compared with which forms of MPI, None: the fastest.
KINDS = {
    "in windows": ("window fields", None),
    "private": ("private fields", None),
    "fresh": ("fresh fields", "sendrecv fresh"),
}
ORDERS = {"`Window.fence`": "fence", "`Node.barrier`": "node.barrier"}
#: The faces in the table of the README, and its columns.
BRIEF_SIZES = (8, 4 << 10, 64 << 10, 1 << 20)
BRIEF_RANKS = (8, 32)
MPIS = ("MPICH", "Open MPI")

Run = dict  # the JSON of one


def of_case(case: str, rows: list[dict]) -> list[str]:
    """A line per size: the time of mpishare, and its ratio to each baseline.

    Fields in windows, private and fresh ones have a line each; of other arms the fastest counts.
    """
    found = medians(rows, case)
    mine, rivals = arms(rows, case, "own"), arms(rows, case, "rival")
    # One for which there was no memory has no arm that ran.
    if not (found and rivals):
        return []
    kinds = {kind: [arm] for arm, kind in FIELDS.items() if arm in mine}
    if kinds:
        kinds["in windows"] = [arm for arm in mine if arm not in FIELDS]
    heads = [CASES[case], *["fields"] * bool(kinds), "mpishare, µs"]
    heads += [f"of {arm}" for arm in rivals]
    lines: list[list[str]] = []
    for nbytes in sizes(found):
        written = len(lines)
        for kind, of_kind in (kinds or {"": mine}).items():
            times = fastest(found, nbytes, of_kind)
            if None not in times:
                beside = [ratios(times, fastest(found, nbytes, [arm])) for arm in rivals]
                beside = ["" if text == "- / -" else text for text in beside]
                lines.append([size(nbytes), *[kind] * bool(kind), pair(times), *beside])
        if len(lines) == written:
            raise RefusedError(f"{case} at {size(nbytes)}: mpishare has no time")
    return table(heads, lines)


def absent(header: dict, rows: list[dict]) -> list[str]:
    """Why rivals did not run, each once, and which sizes were left out."""
    absent = [row for row in rows if row["kind"] == "rival" and not row["ok"]]
    reasons = dict.fromkeys((row["arm"], row["reason"]) for row in absent if row["case"] in CASES)
    lines = [f"- {arm} did not run: {reason}" for arm, reason in reasons]
    left_out = header.get("left_out", {})
    lines += [f"- {CASES[case]}: {text}" for case in CASES for text in left_out.get(case, ())]
    return [*lines, *[""] * bool(lines)]


def _by_size(found: Times, columns: dict[str, tuple[str, str | None]]) -> list[str]:
    """A line per size: the times of arms on both clocks, or their ratios to those beside them."""

    def cell(nbytes: int, arm: str, beside: str | None) -> str:
        times = fastest(found, nbytes, [arm])
        return ratios(times, fastest(found, nbytes, [beside])) if beside else pair(times)

    cells = [[size(n), *(cell(n, *each) for each in columns.values())] for n in sizes(found)]
    return table(["faces", *columns], cells)


def fresh(rows: list[dict]) -> list[str]:
    """Arrays that are new at each call, beside kept ones and messages; both clocks."""
    found = medians(rows, "fresh")
    messages = next(arm for _, arm, _ in found if arm in ("staged", "sendrecv"))
    columns = {
        "new arrays, µs": ("new arrays", None),
        "of kept, copied": ("new arrays", "kept, copied"),
        f"of {messages}": ("new arrays", messages),
        "arrays in turn, µs": ("arrays in turn", None),
        "of kept array": ("arrays in turn", "kept array"),
    }
    return _by_size(found, columns)


def messages(rows: list[dict]) -> list[str]:
    """Messages out of GPU memory, beside those by hand and those through the host; both clocks."""
    lines = []
    for case, text in MESSAGES.items():
        found = medians(rows, case)
        others = {f"by hand, {'in place' if case == 'messages1d' else 'packed'}": "mpi"}
        if all((nbytes, "mpi packed", CLOCKS[0]) in found for nbytes in sizes(found)):
            others["by hand, packed"] = "mpi packed"
        others["through the host"] = "through the host"
        columns = {"out of GPU memory, µs": ("messages", None)}
        columns |= {f"{name}, µs": (arm, None) for name, arm in others.items()}
        columns |= {f"of {name}": ("messages", arm) for name, arm in others.items()}
        lines += [f"{text} per rank:", "", *_by_size(found, columns)]
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


def _best(run: Run, case: str, nbytes: int, arm: str, rival: str | None) -> tuple | None:
    """The time of an arm back to back, and its ratio to a baseline, None: the fastest.

    Nothing where the run has no such size.
    """
    found = on_clock(run["rows"], case)
    if (nbytes, arm) not in found:
        return None
    rivals = [rival] if rival else arms(run["rows"], case, "rival")
    time = found[nbytes, arm]
    return time, time / min(found[nbytes, each] for each in rivals if (nbytes, each) in found)


def _sizes(found: list[Run], case: str) -> list[int]:
    return sizes(key for run in found for key in on_clock(run["rows"], case))


def cores_in_full(found: list[Run]) -> list[str]:
    """Every size and kind of fields: microseconds, and the ratio to the fastest form of MPI."""

    def cells(case: str, nbytes: int, arm: str, rival: str | None = None) -> list[str]:
        each = [_best(run, case, nbytes, arm, rival) for run in found]
        return [f"{us(best[0])} ({best[1]:.2f})" if best else "-" for best in each]

    lines, heads = [], _heads(found)
    for case in ("halo1d", "halo3d"):
        pairs = product(_sizes(found, case), KINDS.items())
        of_case = [[size(n), kind, *cells(case, n, *arms)] for n, (kind, arms) in pairs]
        lines += table([CASES[case].partition(",")[0], "fields", *heads], of_case)
    if all(_sizes([run], "fence") for run in found):
        fences = [[name, *cells("fence", 0, arm)] for name, arm in ORDERS.items()]
        lines += table(["all ranks ordered, over `MPI_Barrier`", *heads], fences)
    return lines


def cores_in_brief(found: list[Run]) -> list[str]:
    """A line per case and size, with the ratios of the three kinds of fields."""
    found = [run for run in found if _name(run)[1] in BRIEF_RANKS]
    cells = []
    for case, nbytes in product(("halo1d", "halo3d"), BRIEF_SIZES):
        near = [n for n in _sizes(found, case) if nbytes <= 1.25 * n and n <= 1.25 * nbytes]
        if near:
            line = [f"{size(nbytes)}, {CASES[case][:3]}"]
            for run in found:
                best = [_best(run, case, near[0], *arms) for arms in KINDS.values()]
                line.append(" / ".join(f"{each[1]:.2f}" if each else "-" for each in best))
            cells.append(line)
    return table(["faces", *_heads(found)], cells)

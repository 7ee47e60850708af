"""Make the tables of figures from the runs in docs/results. Standard library only.

docs/performance.md has the first case of each run, docs/results/README.md all, docs/solvers.md the
solves, the README a machine with a core per rank; the figure of the README is made of one. A ratio
is that of two medians of one file: arms that were measured in turn, in one process and one run. A
file that is not there is left out; one of another name is an error, since nobody would see that it
is not used.
`--check` changes nothing, and fails where the tables are not what the files give.
"""

import argparse
import difflib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import applications
import by_arm
import many_cores
from figure import lines as figure_lines
from figure import svg
from newest import newest, solves
from tables import CLOCKS, RefusedError, medians, over, pair, size, sizes, table

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
#: What each file is of, in the order of the tables.
RUNS = {
    "gpus4": "Four GPUs, one rank per GPU",
    "gpus2": "Two GPUs, one rank per GPU",
    "onegpu-ranks4-mps": "One GPU, four ranks, with the Multi-Process Service (MPS)",
    "onegpu-ranks4": "One GPU, four ranks, without MPS",
    "cpu-mpich": "No GPU, MPICH",
    "cpu-openmpi": "No GPU, Open MPI",
}
#: Runs with a core per rank, one for each MPI and number of ranks.
CORES = {
    f"cpu32-{mpi}-ranks{ranks}": f"No GPU, 32 cores, {ranks} ranks, {name}"
    for mpi, name in (("mpich", "MPICH"), ("openmpi", "Open MPI"))
    for ranks in (8, 28, 32)
}
#: Runs beside the newest version of each library, which have a table of their own.
NEWEST = {
    "newest-gpus2": "Two GPUs, one rank per GPU",
    "newest-onegpu-ranks4-mps": "One GPU, four ranks, with the Multi-Process Service (MPS)",
    "newest-onegpu-ranks4": "One GPU, four ranks, without MPS",
}
#: Runs of the cases jax and fresh, each of the page that has it.
JAX = {"jax-gpus2": "Two GPUs, one rank per GPU", "jax-host": "No GPU"}
FRESH = {"fresh-gpus2": "Two GPUs, one rank per GPU", "fresh-host": "No GPU"}
#: A run of the cases messages1d and messages3d, and what they are of.
MESSAGES = "messages-gpus2"
MIXED = "mixed-gpus2.jsonl"
MESSAGES_CASES = {"messages1d": "Slabs, two faces", "messages3d": "Blocks, six faces"}
#: The cases that are shown; the files have all.
CASES = {
    "halo1d": "1-D halo",
    "halo3d": "3-D halo, six faces",
    "ring": "two faces, in a ring",
    "faces": "faces across the last axis",
}
#: Rows of their own: fields in windows are the other arms of mpishare.
FIELDS = {"private fields": "private", "fresh fields": "fresh"}
#: Beside the runs: what applications printed with --json, a line each.
APPLICATIONS = "applications.jsonl"


def read(path: Path, *, is_whole: bool) -> dict:
    found = json.loads(path.read_text())
    if not (isinstance(found, dict) and {"header", "rows"} <= set(found)):
        raise RefusedError(f"{path.name} is not the JSON of a run")
    if any(row["wrong"] and row["kind"] != "rival" for row in found["rows"]):
        raise RefusedError(f"{path.name} has a wrong result in it")
    if not found["header"]["options"]["check"]:
        raise RefusedError(f"{path.name} is of a run that checked nothing")
    if is_whole and found["header"].get("interrupted"):
        raise RefusedError(f"{path.name} is of a run that was interrupted")
    revision = found["header"]["git_revision"]
    if not revision or revision.endswith("-dirty"):
        raise RefusedError(f"{path.name} is of no revision, or of one with changes: {revision}")
    return found


def runs(folder: Path, names: dict[str, str] = RUNS, *, is_whole: bool = True) -> dict[str, dict]:
    """The runs of these names that are there; none that was ended early, if they must be whole."""
    known = [*RUNS, *CORES, *NEWEST, *JAX, *FRESH, MESSAGES]
    strange = sorted({path.stem for path in folder.glob("*.json")} - set(known))
    if strange:
        raise RefusedError(f"{strange[0]}.json: known are {', '.join(known)}")
    files = {name: folder / f"{name}.json" for name in names}
    return {name: read(path, is_whole=is_whole) for name, path in files.items() if path.exists()}


def origin(header: dict) -> tuple[str, str]:
    """On what, when and from what a run is; with which libraries."""
    models = [gpu["name"] for gpu in header["gpus"]]
    cores = header["cores"]
    machine = f"{len(models)} x {models[0]}" if models else f"{cores} CPU cores"
    if not models and header.get("cpu"):
        bound = ", each bound to one" if header["cores_per_rank"] == 1 else ""
        some = "" if cores == header["cores_of_machine"] else f"{cores} of "
        machine = f"{some}{header['cores_of_machine']} CPU cores"
        machine += f" ({cpu(header)}){bound}"
    driver = f", driver {header['driver']}" if models else ""
    versions = [f"{name} {text}" for name, text in header["versions"].items() if text]
    libraries = f"{' '.join(header['mpi_library'].split())}; {', '.join(versions)}"
    return f"{header['ranks']} ranks on {machine}{driver}; {when(header)}.", f"{libraries}."


def cpu(header: dict) -> str:
    return header["cpu"].replace("(R)", "")


def when(header: dict) -> str:
    return f"{header['date'][:10]}, revision {header['git_revision'][:12]}"


def of_runs(
    folder: Path, names: dict[str, str], tables: Callable, *, is_whole: bool = True
) -> list[str]:
    """The description and the tables of each run."""
    lines = []
    for name, run in runs(folder, names, is_whole=is_whole).items():
        machine, libraries = origin(run["header"])
        case = run["header"].get("interrupted")
        end = f" The run ended in `{case}`; these are the sizes that were finished." if case else ""
        lines += [f"**{names[name]}**: {machine} {libraries}{end}", "", *tables(run["rows"])]
    return lines


def of_case(case: str, rows: list[dict]) -> list[str]:
    """A line per size: the time of mpishare, and its ratio to each baseline.

    Fields in windows, private and fresh ones have a line each; of other arms the fastest counts.
    """
    rows = [row for row in rows if row["case"] == case]
    medians_us = medians(rows, case)
    mine = list(dict.fromkeys(row["arm"] for row in rows if row["kind"] == "own"))
    rivals = list(dict.fromkeys(row["arm"] for row in rows if row["kind"] == "rival" and row["ok"]))
    # One for which there was no memory has no arm that ran.
    if not (medians_us and rivals):
        return []
    kinds = {"": mine}
    of_fields = {kind: [arm] for arm, kind in FIELDS.items() if arm in mine}
    if of_fields:
        kinds = of_fields | {"in windows": [arm for arm in mine if arm not in FIELDS]}
    heads = [CASES[case], *["fields"] * (len(kinds) > 1), "mpishare, µs"]
    heads += [f"of {arm}" for arm in rivals]
    lines: list[list[str]] = []
    for nbytes in sizes(medians_us):
        written = len(lines)
        for kind, arms in kinds.items():
            times = []
            for clock in CLOCKS:
                found = [medians_us.get((nbytes, arm, clock)) for arm in arms]
                times.append(min((time for time in found if time), default=None))
            if None in times:
                continue
            line = [size(nbytes), *[kind] * bool(kind), pair(times)]
            for arm in rivals:
                theirs = [medians_us.get((nbytes, arm, clock)) for clock in CLOCKS]
                ratios = [over(time, [other]) for time, other in zip(times, theirs, strict=True)]
                line.append("" if set(ratios) == {"-"} else " / ".join(ratios))
            lines.append(line)
        if len(lines) == written:
            raise RefusedError(f"{case} at {size(nbytes)}: mpishare has no time")
    return table(heads, lines)


def absent(header: dict, rows: list[dict]) -> list[str]:
    """Why rivals did not run, each once, and which sizes were left out."""
    absent = [row for row in rows if row["kind"] == "rival" and not row["ok"]]
    reasons = dict.fromkeys((row["arm"], row["reason"]) for row in absent if row["case"] in CASES)
    lines = [f"- {arm} did not run: {reason}" for arm, reason in reasons]
    words = [
        (CASES[case], text) for case in CASES for text in header.get("left_out", {}).get(case, ())
    ]
    return lines + [f"- {case}: {text}" for case, text in words]


def brief(name: str, run: dict) -> list[str]:
    machine, _ = origin(run["header"])
    return [f"**{RUNS[name]}**: {machine}", "", *of_case(next(iter(CASES)), run["rows"])]


def section(name: str, run: dict) -> list[str]:
    """All of a run."""
    header, rows = run["header"], run["rows"]
    plot = "" if name in CORES else f", [a plot]({name}.svg)"
    links = f"[The run]({name}.json){plot}."
    lines = [f"## {(RUNS | CORES)[name]}", "", *origin(header), links, ""]
    lines += ["```console", f"$ {header['command']}", "```", ""]
    lines += [line for case in CASES for line in of_case(case, rows)]
    missing = absent(header, rows)
    return [*lines, *missing, *[""] * bool(missing)]


def in_brief(folder: Path) -> list[str]:
    """What stands between the marks of docs/performance.md; nothing where there are no runs."""
    found = runs(folder)
    if not found:
        return of_cores(folder) + of_newest(folder) + of_messages(folder)
    lines = [
        "## Figures",
        "",
        "Made from the runs in [results](results/README.md), which has more cases, the versions",
        "and commands, why a baseline did not run, the applications and the plots. Each table is",
        "one run, named above it; tables of different runs have other revisions and libraries, so",
        "compare within one. Times are medians of the maximum over the ranks, with a synchronize",
        "after each exchange / back to back. *Private* fields are any arrays; fields *in windows*",
        "are those of `node.allocate_each`. A ratio is the time of mpishare over that of a",
        "baseline, timed in turns: below 1 mpishare is faster. Every result was checked. *staged*",
        "is pinned buffers and non-blocking messages, *naive* `asnumpy`, `Sendrecv`, `asarray`;",
        "the others are the calls of MPI or the libraries.",
        "",
    ]
    for name, run in found.items():
        lines += brief(name, run)
    return lines + of_cores(folder) + of_newest(folder) + of_messages(folder)


def of_cores(folder: Path) -> list[str]:
    """What docs/performance.md says of runs with a core per rank."""
    found = list(runs(folder, CORES).values())
    if not found:
        return []
    return [
        "## A core per rank",
        "",
        on_machine(found),
        "Microseconds back to back, and in brackets the ratio to the fastest form of MPI:",
        "`Sendrecv`, `Isend` and `Irecv`, persistent requests, neighborhood collectives (also",
        "persistent, where the MPI has these) and datatypes. *Fresh* fields are new at each call,",
        "more than a plan remembers, and are compared with `Sendrecv` of new arrays.",
        "",
        *many_cores.in_full(found),
    ]


def on_machine(found: list[dict]) -> str:
    """On what runs with a core per rank are; all on one machine."""
    header = found[0]["header"]
    bound = ", each rank bound to one" if header["cores_per_rank"] == 1 else ""
    cores = f"{header['cores_of_machine']} cores ({cpu(header)}){bound}"
    return f"Without a GPU, {cores}; {when(header)}."


def in_readme(folder: Path) -> list[str]:
    """What stands between the marks of the README."""
    found = list(runs(folder, CORES).values())
    if not found:
        return []
    return [
        on_machine(found),
        "Back to back; the time of mpishare over that of the fastest form of MPI, for fields in",
        "windows / private / new at each call (beside `Sendrecv` alone). Above 1 MPI is faster.",
        "[All sizes](docs/performance.md#a-core-per-rank).",
        "",
        *many_cores.in_brief(found),
    ]


def of_newest(folder: Path) -> list[str]:
    """The tables of the newest libraries, with their versions."""
    lines = of_runs(folder, NEWEST, newest, is_whole=False)
    words = [
        "## Compared with the newest libraries",
        "",
        "Microseconds, with a synchronize after each exchange / back to back; of each library",
        "the fastest of its forms: called or captured in a CUDA graph, faces packed into its",
        "memory, or fields that live there. Sums: back to back, called / in a graph / a",
        "twentieth of a graph of twenty. A ratio above 1 says that another library is faster.",
        "",
    ]
    return [*words, *lines] if lines else []


def of_solves(folder: Path) -> list[str]:
    """What stands between the marks of docs/solvers.md."""
    lines = []
    for run in runs(folder, NEWEST, is_whole=False).values():
        found = solves(run["rows"])
        lines += [*origin(run["header"]), "", *found] if found else []
    return lines


def in_full(folder: Path) -> list[str]:
    """What stands between the marks of docs/results/README.md."""
    found = runs(folder) | runs(folder, CORES)
    lines = [line for name, run in found.items() for line in section(name, run)]
    return lines + of_fresh(folder) + applications.lines(folder / APPLICATIONS)


def of_fresh(folder: Path) -> list[str]:
    """The tables of arrays that are new at each call."""
    lines = of_runs(folder, FRESH, by_arm.fresh)
    words = [
        "## Arrays that are new at each call",
        "",
        "*New arrays*: a copy of the array of the step before, and its exchange; beside the same",
        "with two arrays that are *kept*, and with messages. *In turn*: the exchange alone, of 80",
        "arrays one after the other, beside one array.",
        "",
    ]
    return [*words, *lines] if lines else []


def of_messages(folder: Path) -> list[str]:
    """The tables of messages to other nodes."""
    lines = []
    for run in runs(folder, {MESSAGES: ""}).values():
        lines = [
            "## Messages to other nodes",
            "",
            "On one machine, with every face sent by the MPI (`MPISHARE_ROUTE`), which takes",
            "pointers to GPU memory. *By hand*: persistent requests on device buffers; slabs are",
            "sent in place, the faces of blocks packed by one kernel and unpacked by another.",
            "",
            *origin(run["header"]),
            "",
        ]
        for case, text in MESSAGES_CASES.items():
            lines += [f"{text} per rank:", "", *by_arm.messages(run["rows"], case)]
    path = folder / MIXED
    if path.exists():
        lines += [
            "Two nodes of two ranks, pretended on two GPUs under MPS, one GPU per node",
            "(`scripts/lib/mixed_nodes.py`). Each rank has a neighbor on its node and one on the",
            "other: alone, and in one plan. *Its kernel* is the fused part of that plan, timed on",
            "the GPU from `start` on; *beside the exchange* is an interior that takes 1.5 times",
            "as long as the exchange, from `start` to `wait`.",
            "",
            *by_arm.mixed([json.loads(line) for line in path.read_text().splitlines()]),
        ]
    return lines


def of_jax(folder: Path) -> list[str]:
    """What stands between the marks of docs/jax.md."""
    return of_runs(folder, JAX, by_arm.jax)


#: The files, and what stands between their marks.
PAGES = {
    "README.md": in_readme,
    "docs/performance.md": in_brief,
    "docs/results/README.md": in_full,
    "docs/jax.md": of_jax,
    "docs/solvers.md": of_solves,
}
FIGURE = "docs/figures/halo1d.svg"
FIGURE_RUN, FIGURE_TITLE = "newest-gpus2", "Time of one 1-D halo exchange, two GPUs, back to back"


def updated(name: str, old: str, lines: list[str]) -> str:
    """The text of a page with these lines between its marks."""
    if old.count(BEGIN) != 1 or old.count(END) != 1:
        raise RefusedError(f"{name} wants one {BEGIN} and one {END}")
    before, _, rest = old.partition(BEGIN)
    _, _, after = rest.partition(END)
    text = "\n".join(lines)
    return f"{before}{BEGIN}\n{text}{END}{after}"


def figure(folder: Path) -> dict[str, str]:
    """The figure of the README, by its name; none where its run is missing."""
    run = runs(folder, NEWEST, is_whole=False).get(FIGURE_RUN)
    return {FIGURE: svg(run, FIGURE_TITLE)} if run and figure_lines(run["rows"]) else {}


def main(words: list[str], root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="scripts/results", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail where it would")
    options = parser.parse_args(words)
    old = {name: (root / name).read_text() for name in PAGES}
    folder = root / "docs" / "results"
    try:
        made = {name: lines(folder) for name, lines in PAGES.items()}
        new = {name: updated(name, old[name], made[name]) for name in PAGES} | figure(folder)
    except RefusedError as refused:
        print(f"scripts/results: {refused}", file=sys.stderr)
        return 1
    if FIGURE in new:
        file = root / FIGURE
        old[FIGURE] = file.read_text() if file.exists() else ""
    for name in new:
        if options.check:
            names, pair = (name, "what docs/results gives"), (old[name], new[name])
            lines = difflib.unified_diff(*map(str.splitlines, pair), *names, lineterm="")
            sys.stdout.writelines(f"{line}\n" for line in lines)
        else:
            (root / name).write_text(new[name])
    return int(options.check and old != new)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

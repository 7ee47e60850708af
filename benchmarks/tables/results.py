"""Make the tables and the charts from the runs in docs/results. Standard library only.

A page has each table between two marks, and the words about it outside of them. A ratio is that of
two medians of one file: arms that were measured in turn, in one process and one run. A file that is
not there is left out; one of another name is an error, since nobody would see that it is not used.
`--check` changes nothing, and fails where the tables are not what the files give.
"""

import argparse
import difflib
import re
import sys
from collections.abc import Callable
from pathlib import Path

import figure
import halos
import others
from tables import CORES, RUNS, RefusedError, of_runs, origin, runs

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- results: {} -->", "<!-- results: end -->"
FIGURE = "docs/figures/{}.svg"


def brief(folder: Path) -> list[str]:
    """The first case of each run."""
    lines = []
    for name, run in runs(folder).items():
        machine, _ = origin(run["header"])
        lines += [f"**{RUNS[name]}**: {machine}", "", *halos.of_case("halo1d", run["rows"])]
    return lines


def full(folder: Path) -> list[str]:
    """All cases of each run, its command, and why a baseline did not run."""
    lines = []
    for name, run in (runs(folder) | runs(folder, "cpu32-")).items():
        header, rows = run["header"], run["rows"]
        plot = "" if name in CORES else f", [a plot]({name}.svg)"
        links = f"[The run]({name}.json){plot}."
        lines += [f"## {RUNS[name]}", "", *origin(header), links, ""]
        lines += ["```console", f"$ {header['command']}", "```", ""]
        lines += [line for case in halos.CASES for line in halos.of_case(case, rows)]
        lines += halos.absent(header, rows)
    return lines


def of_cores(table: Callable[[list[dict]], list[str]]) -> Callable[[Path], list[str]]:
    """The table of all runs with a core per rank, below the machine that they are of."""

    def lines(folder: Path) -> list[str]:
        found = list(runs(folder, "cpu32-").values())
        return [*halos.on_machine(found), *table(found)] if found else []

    return lines


def charts(*names: str) -> Callable[[Path], list[str]]:
    """The charts of these names, where a page shows them."""
    return lambda folder: figure.shown(folder, *names)


#: The tables of each page, by their marks, and the figures.
PAGES: dict[str, dict[str, Callable[[Path], list[str]]]] = {
    "docs/performance.md": {
        "halos-drawn": charts("halo1d-gpus2", "halo3d-gpus2", "halo1d-mps"),
        "halos": brief,
        "cores-drawn": charts("halo1d-mpich", "halo3d-mpich", "halo1d-openmpi", "halo3d-openmpi"),
        "cores-in-brief": of_cores(halos.cores_in_brief),
        "cores": of_cores(halos.cores_in_full),
        "newest-drawn": charts("halo1d", "ring", "allreduce"),
        "newest": lambda folder: of_runs(folder, "newest-", others.newest, is_whole=False),
        "messages-drawn": charts("messages1d", "messages3d"),
        "messages": lambda folder: of_runs(folder, "messages-", halos.messages),
        "redistribute-drawn": charts("redistribute", "allgather"),
        "redistribute": lambda folder: of_runs(folder, "redistribute-", others.redistributed),
        "allgather": lambda folder: of_runs(folder, "allgather-", others.redistributed),
        "counts": lambda folder: others.counts(folder / "ranks-host.jsonl"),
    },
    "docs/comparison.md": {
        "compared": lambda folder: of_runs(folder, "newest-", others.compared, is_whole=False),
        "compared-mpi": lambda folder: of_runs(folder, "", others.compared),
    },
    "docs/results/README.md": {
        "runs": full,
        "fresh": lambda folder: of_runs(folder, "fresh-", halos.fresh),
        "applications": lambda folder: others.applications(folder / "applications.jsonl"),
    },
    "docs/device.md": {
        "kernels": lambda folder: of_runs(folder, "kernels-", others.kernels, is_whole=False)
    },
    "docs/jax.md": {"jax": lambda folder: of_runs(folder, "jax-", others.jax)},
    "docs/solvers.md": {
        "solves": lambda folder: of_runs(folder, "newest-", others.solves, is_whole=False)
    },
}


def updated(page: str, text: str, folder: Path) -> str:
    """The text of a page with its tables between their marks."""
    if text.count(END) != len(PAGES[page]):
        raise RefusedError(f"{page} wants {len(PAGES[page])} {END}")
    for name, lines in PAGES[page].items():
        begin = BEGIN.format(name)
        found = re.search(f"{begin}\n.*?{END}", text, re.DOTALL)
        if text.count(begin) != 1 or found is None:
            raise RefusedError(f"{page} wants one {begin}")
        made = f"{begin}\n" + "\n".join(lines(folder)) + END
        text = text[: found.start()] + made + text[found.end() :]
    return text


def drawn(folder: Path) -> dict[str, str]:
    """Every figure, by its file."""
    found = figure.of_runs(folder).items()
    return {FIGURE.format(name): figure.svg(chart, run) for name, (chart, run) in found}


def main(words: list[str], root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="scripts/results", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail where it would")
    options = parser.parse_args(words)
    old = {page: (root / page).read_text() for page in PAGES}
    folder = root / "docs" / "results"
    try:
        new = {page: updated(page, old[page], folder) for page in PAGES} | drawn(folder)
    except RefusedError as refused:
        print(f"scripts/results: {refused}", file=sys.stderr)
        return 1
    for name in new.keys() - old.keys():
        file = root / name
        old[name] = file.read_text() if file.exists() else ""
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

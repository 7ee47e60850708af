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
import steps
from tables import RUNS, RefusedError, of_runs, read, runs, table

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- results: {} -->", "<!-- results: end -->"
FIGURE = "docs/figures/{}.svg"


def listed(folder: Path) -> list[str]:
    """A line per run: machine, day, revision and command."""
    cells = []
    for name in RUNS:
        file = folder / f"{name}.json"
        if file.exists():
            header = read(file, is_whole=False)["header"]
            about = f"{header['date'][:10]}, {header['git_revision'][:12]}"
            command = header["command"].replace("|", "\\|")
            cells.append([f"[{name}]({name}.json)", RUNS[name], about, f"`{command}`"])
    return table(["run", "on", "day, revision", "command"], cells)


def of_cores(made: Callable[[list[dict]], list[str]]) -> Callable[[Path], list[str]]:
    """The table of all runs with a core per rank, below the machine that they are of."""

    def lines(folder: Path) -> list[str]:
        found = list(runs(folder, "cpu32-").values())
        return [*halos.on_machine(found), *made(found)] if found else []

    return lines


def charts(*names: str) -> Callable[[Path], list[str]]:
    """The charts of these names, where a page shows them."""
    return lambda folder: figure.shown(folder, *names)


#: The tables of each page, by their marks, and the figures.
PAGES: dict[str, dict[str, Callable[[Path], list[str]]]] = {
    "docs/performance.md": {
        "cores-drawn": charts("halo1d-mpich", "halo3d-mpich", "halo1d-openmpi", "halo3d-openmpi"),
        "cores-in-brief": of_cores(halos.cores_in_brief),
        "cores": of_cores(halos.cores_in_full),
        "gpus-drawn": charts("halo1d", "halo3d", "ring", "allreduce", "halo1d-mps"),
        "gpus": lambda folder: [
            line
            for kind in ("", "mpi-", "sums-")
            for line in of_runs(folder, kind, others.newest, is_whole=False)
        ],
        "messages-drawn": charts("messages1d", "messages3d"),
        "messages": lambda folder: of_runs(folder, "messages-", halos.messages),
        "nodes": lambda folder: of_runs(
            folder,
            "nodes-",
            lambda rows: [*halos.nodes(rows), *others.solves(rows)],
            is_whole=False,
        ),
        "redistribute-drawn": charts("redistribute", "allgather"),
        "redistribute": lambda folder: of_runs(folder, "redistribute-", others.redistributed),
        "allgather": lambda folder: of_runs(folder, "allgather-", others.redistributed),
        "steps": steps.over_ranks,
        "counts": lambda folder: others.counts(folder / "ranks-host.jsonl"),
    },
    "docs/comparison.md": {
        "compared": lambda folder: of_runs(folder, "", others.compared, is_whole=False),
        "compared-mpi": lambda folder: of_runs(folder, "mpi-", others.compared),
    },
    "docs/results/README.md": {
        "runs": listed,
        "fresh": lambda folder: of_runs(folder, "fresh-", halos.fresh),
        "applications": lambda folder: others.applications(folder / "applications.jsonl"),
    },
    "docs/device.md": {
        "kernels": lambda folder: of_runs(folder, "kernels-", others.kernels, is_whole=False)
    },
    "docs/particles.md": {
        "rows": lambda folder: of_runs(folder, "rows-", others.moved, is_whole=False)
    },
    "docs/jax.md": {"jax": lambda folder: of_runs(folder, "jax-", others.jax)},
    "docs/solvers.md": {
        "solves": lambda folder: [
            line
            for kind in ("", "sums-")
            for line in of_runs(folder, kind, others.solves, is_whole=False)
        ]
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
    found = {name: figure.svg(*each) for name, each in figure.of_runs(folder).items()}
    return {FIGURE.format(name): text for name, text in found.items()}


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

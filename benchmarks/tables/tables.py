"""What all tables of figures have in common: how a run is read, and how its figures are written."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

CLOCKS = ("latency", "throughput")
UNITS = (("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))
#: On what runs are, in the order of the tables; the name of a file ends in one of these.
PLACES = {
    "gpus4": "Four GPUs, one rank per GPU",
    "gpus2": "Two GPUs, one rank per GPU",
    "onegpu-ranks4-mps": "One GPU, four ranks, with the Multi-Process Service (MPS)",
    "onegpu-ranks4": "One GPU, four ranks, without MPS",
    "onegpu-ranks2-mps": "One GPU, two ranks, with MPS",
    "host-ranks2": "No GPU, 2 ranks",
    "host-ranks8": "No GPU, 8 ranks",
    "host-ranks28": "No GPU, 28 ranks",
    "host": "No GPU",
}
#: Runs with a core per rank, one for each MPI and number of ranks.
CORES = {
    f"cpu32-{mpi}-ranks{ranks}": f"No GPU, 32 cores, {ranks} ranks, {name}"
    for mpi, name in (("mpich", "MPICH"), ("openmpi", "Open MPI"))
    for ranks in (8, 32)
}
#: The title of each file: its cases beyond those of every run, then the place.
RUNS = {
    f"{kind}{place}": title
    for kind in (
        "",
        "mpi-",
        "sums-",
        "jax-",
        "fresh-",
        "messages-",
        "nodes-",
        "nodes-sums-",
        "redistribute-",
        "allgather-",
        "kernels-",
        "rows-",
    )
    for place, title in PLACES.items()
} | CORES


class RefusedError(Exception):
    """What is wrong with a file of figures, in one line."""


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


def runs(folder: Path, kind: str = "", *, is_whole: bool = True) -> dict[str, dict]:
    """The runs of a kind that are there; none that was ended early, if they must be whole."""
    strange = sorted({path.stem for path in folder.glob("*.json")} - set(RUNS))
    if strange:
        raise RefusedError(f"{strange[0]}.json: known are {', '.join(RUNS)}")
    names = filter(lambda name: name.startswith(kind), RUNS) if kind else PLACES
    files = {name: folder / f"{name}.json" for name in names}
    return {name: read(path, is_whole=is_whole) for name, path in files.items() if path.exists()}


def of_runs(
    folder: Path, kind: str, tables: Callable[[list[dict]], list[str]], *, is_whole: bool = True
) -> list[str]:
    """The description and the tables of each run that has some."""
    lines = []
    for name, run in runs(folder, kind, is_whole=is_whole).items():
        found = tables(run["rows"])
        case = run["header"].get("interrupted")
        end = f" The run ended in `{case}`; these are the sizes that were finished." if case else ""
        about = " ".join(origin(run["header"])) + end
        lines += [f"**{RUNS[name]}**: {about}", "", *found] if found else []
    return lines


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


class Case:
    """The medians of a case in a run, in microseconds, of the arms that ran."""

    def __init__(self, rows: list[dict], name: str) -> None:
        self.rows = [row for row in rows if row["case"] == name and row["ok"]]
        self.times = {
            (row["nbytes"], row["arm"], row["clock"]): row["median_us"] for row in self.rows
        }
        self.sizes = sorted({row["nbytes"] for row in self.rows})
        self.ran = list(dict.fromkeys(row["arm"] for row in self.rows))

    def arms(self, kind: str) -> list[str]:
        """The arms of a kind, in their order."""
        return list(dict.fromkeys(row["arm"] for row in self.rows if row["kind"] == kind))

    def best(self, nbytes: int, arms: Iterable[str]) -> list[float | None]:
        """The time on each clock of the fastest of these arms."""
        keys = [[(nbytes, arm, clock) for arm in arms] for clock in CLOCKS]
        times = [filter(None, map(self.times.get, each)) for each in keys]
        return [min(each, default=None) for each in times]

    def back(self, nbytes: int, *arms: str) -> float | None:
        """The time back to back of the fastest of these arms."""
        return self.best(nbytes, arms)[1]

    def by_arm(self) -> dict[str, float]:
        """The times back to back of a case of one size."""
        return {arm: time for (_, arm, clock), time in self.times.items() if clock == CLOCKS[1]}


def size(nbytes: int) -> str:
    return next(f"{nbytes / unit:.4g} {name}" for name, unit in UNITS if nbytes >= unit)


def us(time: float | None) -> str:
    return "-" if time is None else f"{time:.3g}" if time < 100 else f"{time:.0f}"


def pair(times: Iterable[float | None]) -> str:
    return " / ".join(map(us, times))


def over(time: float | None, others: Iterable[float | None]) -> str:
    """The ratio to the fastest of others that ran."""
    known = [other for other in others if other]
    return "-" if time is None or not known else f"{time / min(known):.2f}"


def ratios(times: Sequence[float | None], *others: Sequence[float | None]) -> str:
    """The ratio of each time to the fastest of the others on the same clock."""
    pairs = zip(times, zip(*others, strict=True), strict=True)
    return " / ".join(over(time, beside) for time, beside in pairs)


def by_size(head: str, case: Case, columns: dict[str, Callable[[int], str]]) -> list[str]:
    """A line per size of a case, its cells made by the columns."""
    cells = [[size(n), *(cell(n) for cell in columns.values())] for n in case.sizes]
    return table([head, *columns], cells)


def table(heads: Sequence[str], cells: list[list[str]]) -> list[str]:
    """The lines of a table; none where it has no cells."""
    lines = ["| " + " | ".join(words) + " |" for words in (heads, *cells)]
    return [lines[0], "|---" * len(heads) + "|", *lines[1:], ""] if cells else []

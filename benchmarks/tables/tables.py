"""What all tables of figures have in common: how a run is read, and how its figures are written."""

from collections.abc import Iterable

CLOCKS = ("latency", "throughput")
UNITS = (("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))


class RefusedError(Exception):
    """What is wrong with a file of figures, in one line."""


def medians(rows: list[dict], case: str) -> dict[tuple[int, str, str], float]:
    """The times of a case, by size, arm and clock."""
    return {
        (row["nbytes"], row["arm"], row["clock"]): row["median_us"]
        for row in rows
        if row["case"] == case and row["ok"]
    }


def sizes(found: Iterable[tuple]) -> list[int]:
    """The sizes in the keys of `medians`."""
    return sorted({key[0] for key in found})


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


def by_size(
    heads: list[str],
    found: dict[tuple[int, str, str], float],
    columns: Iterable[tuple[str, str | None]],
) -> list[str]:
    """A line per size: the times of arms on both clocks, or their ratios to those beside them."""

    def cell(nbytes: int, arm: str, beside: str | None) -> str:
        times = [found[nbytes, arm, clock] for clock in CLOCKS]
        if beside is None:
            return pair(times)
        others = [found[nbytes, beside, clock] for clock in CLOCKS]
        return " / ".join(over(a, [b]) for a, b in zip(times, others, strict=True))

    columns = list(columns)
    return table(heads, [[size(n), *(cell(n, *each) for each in columns)] for n in sizes(found)])


def table(heads: list[str], cells: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(words) + " |" for words in (heads, *cells)]
    return [lines[0], "|---" * len(heads) + "|", *lines[1:], ""]

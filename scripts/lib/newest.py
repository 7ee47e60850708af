"""The table of the newest libraries: the time of each in its fastest form."""

CLOCKS = ("latency", "throughput")
#: The arms of each column: called or in a graph, with faces packed or sent from where they are.
COLUMNS = {
    "mpishare": ("window fields", "private fields"),
    "CUDA-aware MPI": ("mpi",),
    "NCCL send and receive": ("nccl", "nccl graph", "nccl windows"),
    "NCCL put and signal": ("nccl put", "nccl put graph", "nccl put in place"),
    "NCCL in a kernel": ("nccl device", "nccl device graph", "nccl device in place"),
    "NVSHMEM": ("nvshmem", "nvshmem graph", "nvshmem in place"),
    "PyTorch symmetric memory": ("torch", "torch graph", "torch in place"),
}
UNITS = (("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))


def size(nbytes: int) -> str:
    return next(f"{nbytes / unit:.4g} {name}" for name, unit in UNITS if nbytes >= unit)


def us(time: float) -> str:
    return f"{time:.3g}" if time < 100 else f"{time:.0f}"


def newest(rows: list[dict]) -> list[str]:
    """The lines of the table of 1-D halos, and why a column has no times."""
    rows = [row for row in rows if row["case"] == "halo1d"]
    medians = {
        (row["nbytes"], row["arm"], row["clock"]): row["median_us"] for row in rows if row["ok"]
    }

    def best(nbytes: int, arms: tuple[str, ...], clock: str) -> float | None:
        found = [medians.get((nbytes, arm, clock)) for arm in arms]
        return min((time for time in found if time is not None), default=None)

    columns = {
        name: arms for name, arms in COLUMNS.items() if any(key[1] in arms for key in medians)
    }
    heads = ["1-D halo", *columns, "mpishare over the fastest"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for nbytes in sorted({key[0] for key in medians}):
        cells, ratios = [], []
        times = {
            name: [best(nbytes, arms, clock) for clock in CLOCKS] for name, arms in columns.items()
        }
        for found in times.values():
            cells.append(" / ".join("-" if time is None else us(time) for time in found))
        for number in range(len(CLOCKS)):
            mine, *others = (found[number] for found in times.values())
            fastest = min(time for time in others if time is not None)
            ratios.append(f"{mine / fastest:.2f}")
        lines.append("| " + " | ".join([size(nbytes), *cells, " / ".join(ratios)]) + " |")
    reasons = {row["reason"]: None for row in rows if row["kind"] == "rival" and not row["ok"]}
    missing = [f"- not run: {reason}" for reason in reasons]
    return [*lines, "", *missing, *[""] * bool(missing)]

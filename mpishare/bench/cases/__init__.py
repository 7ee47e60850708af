"""The cases: what each one times, and beside which rivals. One file a case."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One case as ``list`` shows it; the module of the same name holds its ``run(session)``.

    Attributes
    ----------
    name : str
        The case, and its module in `mpishare.bench.cases`.
    summary : str
        What it times, in one line.
    arms : tuple of str
        The arms of mpishare.
    rivals : dict of str to tuple of str
        For each backend, what they are measured beside.
    is_sized : bool
        Whether it runs once for each size.
    """

    name: str
    summary: str
    arms: tuple[str, ...]
    rivals: dict[str, tuple[str, ...]]
    is_sized: bool = False


_ALL = (
    Case(
        "setup",
        "making a node, windows and an event; closing them is not counted",
        ("Node", "event", "allocate", "allocate_each"),
        {"host": ("allocate_shared",), "cuda": ()},
    ),
    Case(
        "fence",
        "Window.fence: every rank's work before every rank's next",
        ("fence",),
        {"host": ("barrier",), "cuda": ("barrier", "counters")},
    ),
    Case(
        "pairwise",
        "post, start, complete and wait with both neighbors, no data",
        ("pairwise",),
        {"host": ("sendrecv", "barrier"), "cuda": ("sendrecv", "counters")},
    ),
    Case(
        "event",
        "record and wait: one hop to every waiter, and there and back",
        ("hop", "pingpong"),
        {"host": ("bcast", "send"), "cuda": ("bcast", "send")},
    ),
    Case(
        "bandwidth",
        "copies into a rank's own and into its neighbor's segment",
        ("own", "neighbor"),
        {"host": ("memcpy",), "cuda": ("memcpy",)},
        is_sized=True,
    ),
    Case(
        "ring",
        "both neighbors' faces moved through windows",
        ("window pairwise", "window fence"),
        {
            "host": ("isend", "persistent", "sendrecv"),
            "cuda": ("isend", "persistent", "sendrecv"),
        },
        is_sized=True,
    ),
)

#: Every case by its name, in the order of a full run.
CASES = {case.name: case for case in _ALL}

#: Every rival that some case has on some backend.
RIVALS = tuple(sorted({name for case in _ALL for names in case.rivals.values() for name in names}))

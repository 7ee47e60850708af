"""The cases: what each one times, and beside which rivals. One file a case."""

from __future__ import annotations

from dataclasses import dataclass, field


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
    on_request : frozenset of str
        Those of them that run only if the command line names them, or all: they take long to set
        up, or are no rivals but ceilings.
    is_sized : bool
        Whether it runs once for each size.
    is_default : bool
        Whether it runs where no case is named.
    sizes : dict of str to tuple of int, bytes
        For each backend, the sizes of a run that names none; those of `Options` where there are
        none here.
    most_nbytes : int or None, bytes
        Beyond this a size runs only if the command line names it.
    takes_halo : bool
        Whether ``--width``, ``--fields`` and ``--corners`` are for it.
    """

    name: str
    summary: str
    arms: tuple[str, ...]
    rivals: dict[str, tuple[str, ...]]
    on_request: frozenset[str] = frozenset()
    is_sized: bool = False
    is_default: bool = True
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    most_nbytes: int | None = None
    takes_halo: bool = False


#: What carries words from GPU to GPU, see `mpishare.bench.links`.
LINKS = ("mpi", "nccl", "nvshmem", "torch")
#: What the machine can do at best, see `mpishare.bench.cases.ceilings`.
CEILINGS = "ceilings"


def _halo(
    name: str,
    axes: str,
    sizes: dict[str, tuple[int, ...]],
    most_nbytes: int | None,
    *,
    is_default: bool = False,
    ceilings: tuple[str, ...] = (),
) -> Case:
    return Case(
        name,
        f"ghosts of blocks in a cart of {axes}, n cells a rank along each",
        ("window fields", "private fields"),
        {
            "host": ("sendrecv", "isend", "persistent", "neighborhood", "datatypes"),
            "cuda": ("staged", "naive", *LINKS, *ceilings),
        },
        on_request=frozenset({"naive", *LINKS, *ceilings}),
        is_sized=True,
        is_default=is_default,
        sizes=sizes,
        most_nbytes=most_nbytes,
        takes_halo=True,
    )


_ALL = (
    Case(
        "setup",
        "making a node, windows, an event and plans; closing them is not counted",
        ("Node", "event", "allocate", "allocate_each", "plan", "plan, 16 fields", "second plan"),
        {"host": ("allocate_shared",), "cuda": ("handles",)},
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
            "cuda": ("staged", *LINKS, CEILINGS),
        },
        on_request=frozenset({*LINKS, CEILINGS}),
        is_sized=True,
    ),
    _halo("halo1d", "one axis", {}, None, ceilings=(CEILINGS,)),
    # A block of the largest sizes has the square or the cube of a face: gigabytes a rank.
    _halo(
        "halo2d",
        "two axes",
        {"host": (512, 4 << 10, 16 << 10), "cuda": (512, 4 << 10, 64 << 10)},
        64 << 10,
    ),
    _halo(
        "halo3d",
        "three axes",
        {"host": (4 << 10, 64 << 10), "cuda": (4 << 10, 64 << 10, 1 << 20)},
        1 << 20,
        is_default=True,
    ),
    Case(
        "faces",
        "ghosts across the last axis of a cube beside those across its first",
        ("last axis",),
        {"host": ("first axis",), "cuda": ("first axis",)},
        is_sized=True,
        is_default=False,
        sizes={"host": (4 << 10, 64 << 10), "cuda": (64 << 10, 1 << 20)},
        most_nbytes=1 << 20,
        takes_halo=True,
    ),
    Case(
        "calls",
        "how long the host is busy with an exchange: on CUDA not until it is done",
        ("2 neighbors, 1 field", "26 neighbors, 16 fields"),
        {"host": (), "cuda": (CEILINGS,)},
        is_default=False,
    ),
)

#: Every case by its name, in the order of a full run.
CASES = {case.name: case for case in _ALL}

#: The cases of a run that names none.
DEFAULT_CASES = tuple(case.name for case in _ALL if case.is_default)

#: Every rival that some case has on some backend.
RIVALS = tuple(sorted({name for case in _ALL for names in case.rivals.values() for name in names}))

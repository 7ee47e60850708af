"""The catalog of the cases: what each one times, and against which baselines."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    """One case, as ``list`` shows it."""

    name: str
    summary: str  # what it times, in one line
    variants: tuple[str, ...]  # of mpishare
    baselines: dict[str, tuple[str, ...]]  # for each backend
    # The baselines that run only if the command line names them, or all: they take long to set up,
    # or are upper bounds.
    on_request: frozenset[str] = frozenset()
    # The module here whose run(session, case) times it; by default that of the same name.
    module: str = ""
    is_sized: bool = False  # whether it runs once for each size
    is_default: bool = True  # whether it runs where no case is named
    # The sizes in bytes on each backend of a run that names none; by default those of `Options`.
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    max_nbytes: int | None = None  # a larger size runs only if the command line names it
    takes_halo: bool = False  # whether --width, --fields and --corners apply to it
    note: str = ""  # what is timed under names that do not tell it


#: Libraries that move data from GPU to GPU, see `mpishare.bench.baselines.library`.
LIBRARIES = ("mpi", "nccl", "nccl4py", "nvshmem", "torch")
#: What the machine can do at best, see `mpishare.bench.baselines.upper_bounds`.
UPPER_BOUNDS = "ceilings"
#: How the names of baselines begin that are no form of MPI.
NOT_MPI = (
    *("memcpy", "counters", "handles", "first axis", "window"),
    *("loop", "recorded", "unrolled", "padded", "exchange", "mpi4jax", "nccl", "nvshmem", "torch"),
)


def _messages(name: str, axes: str, max_nbytes: int | None) -> Case:
    return Case(
        name,
        f"the same by MPI messages, as to another node, in a cart of {axes}",
        ("messages", "through the host"),
        {"host": ("persistent",), "cuda": ("mpi", "packed")},
        module="halo",
        is_sized=True,
        is_default=False,
        max_nbytes=max_nbytes,
        takes_halo=True,
    )


def _halo(
    name: str,
    axes: str,
    sizes: dict[str, tuple[int, ...]],
    max_nbytes: int | None,
    *,
    is_default: bool = False,
    upper_bounds: tuple[str, ...] = (),
) -> Case:
    return Case(
        name,
        f"ghosts of blocks in a cart of {axes}, n cells a rank along each",
        ("window fields", "private fields", "on the host fresh fields, others at each call"),
        {
            "host": ("sendrecv", "isend", "persistent", "neighborhood", "datatypes"),
            "cuda": ("staged", "naive", *LIBRARIES, *upper_bounds),
        },
        on_request=frozenset({"naive", *LIBRARIES, *upper_bounds}),
        module="halo",
        is_sized=True,
        is_default=is_default,
        sizes=sizes,
        max_nbytes=max_nbytes,
        takes_halo=True,
    )


_ALL = (
    Case(
        "setup",
        "making a node, windows, an event and plans; closing them is not counted",
        (
            "Node",
            "event",
            "allocate",
            "allocate_each",
            "share_each",
            "plan",
            "plan, 16 fields",
            "second plan",
        ),
        {"host": ("allocate_shared",), "cuda": ("handles",)},
    ),
    Case(
        "fence",
        "Window.fence: every rank's work before every rank's next",
        ("fence", "node.barrier"),
        {"host": ("barrier",), "cuda": ("barrier", "counters")},
        module="ordering",
    ),
    Case(
        "pairwise",
        "post, start, complete and wait with both neighbors, no data",
        ("pairwise",),
        {"host": ("sendrecv", "barrier"), "cuda": ("sendrecv", "counters")},
        module="ordering",
    ),
    Case(
        "event",
        "record and wait: one hop to every waiter, and there and back",
        ("hop", "pingpong"),
        {"host": ("bcast", "send"), "cuda": ("bcast", "send")},
    ),
    Case(
        "allreduce",
        "the sum over all ranks of an array, in place",
        ("reduce", "reduce graph", "reduce graph of 20", "window", "complex128"),
        {"host": ("allreduce",), "cuda": ("staged", "float", *LIBRARIES)},
        on_request=frozenset(LIBRARIES),
        is_sized=True,
        is_default=False,
        sizes={
            "host": (8, 1 << 10, 64 << 10, 1 << 20, 16 << 20),
            "cuda": (8, 128, 1 << 10, 16 << 10, 256 << 10, 1 << 20, 16 << 20, 64 << 20),
        },
    ),
    Case(
        "dot",
        "the sum over all ranks of the products of two arrays of 2^20 numbers",
        ("dot",),
        dict.fromkeys(("host", "cuda"), ("vdot and allreduce",)),
        module="allreduce",
        is_default=False,
    ),
    Case(
        "channel",
        "a stream of arrays from one rank to the next, written in place by a copy",
        ("channel",),
        {"host": ("window", "send"), "cuda": ("window", "send")},
        is_sized=True,
        is_default=False,
        sizes=dict.fromkeys(("host", "cuda"), (4 << 10, 1 << 20, 64 << 20)),
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
            "cuda": ("staged", *LIBRARIES, UPPER_BOUNDS),
        },
        on_request=frozenset({*LIBRARIES, UPPER_BOUNDS}),
        module="halo",
        is_sized=True,
    ),
    _halo("halo1d", "one axis", {}, None, is_default=True, upper_bounds=(UPPER_BOUNDS,)),
    # Volumes grow as the square or the cube of a face: at the largest sizes, gigabytes per rank.
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
    _messages("messages1d", "one axis", None),
    _messages("messages3d", "three axes", 16 << 20),
    Case(
        "faces",
        "ghosts across the last axis of a cube beside those across its first",
        ("last axis",),
        {"host": ("first axis",), "cuda": ("first axis",)},
        module="halo",
        is_sized=True,
        is_default=False,
        sizes={"host": (4 << 10, 64 << 10), "cuda": (64 << 10, 1 << 20)},
        max_nbytes=1 << 20,
        takes_halo=True,
    ),
    Case(
        "inplace",
        "ghosts of fields that were shared in place, beside fields of allocate_each",
        ("in place",),
        {"host": ("window fields",), "cuda": ("window fields",)},
        module="halo",
        is_sized=True,
        is_default=False,
        takes_halo=True,
    ),
    Case(
        "fresh",
        "a ring's faces, of arrays that are new at each call, beside arrays that are kept",
        ("new arrays", "kept, copied", "arrays in turn", "kept array"),
        {"host": ("sendrecv",), "cuda": ("staged",)},
        is_sized=True,
        is_default=False,
        sizes={
            "host": (512, 8 << 10, 72 << 10, 1 << 20),
            "cuda": (8, 4 << 10, 64 << 10, 1 << 20),
        },
        max_nbytes=1 << 20,
        takes_halo=True,
        note="'new arrays' copies the fields into new arrays and exchanges these, as the messages "
        "below do; 'kept, copied' does the same work on arrays that are kept. 'arrays in turn' "
        "exchanges arrays that were made before, more of them than a plan remembers; 'kept array' "
        "one of them, again and again: without a copy, so that messages are no measure of it.",
    ),
    Case(
        "jax",
        "an exchange in each of a hundred steps of a program that JAX has compiled",
        ("loop", "recorded", "unrolled", "padded"),
        dict.fromkeys(("host", "cuda"), ("alone", "called", "mpi4jax")),
        on_request=frozenset({"mpi4jax"}),
        module="jitted",
        is_sized=True,
        is_default=False,
        sizes=dict.fromkeys(("host", "cuda"), (8, 4 << 10, 64 << 10)),
        max_nbytes=1 << 20,
    ),
    Case(
        "cg",
        "a pass of conjugate gradients in a box: 3 kernels, an exchange and 2 sums",
        ("calls", "calls, dot", "graph", "one graph"),
        {"host": ("isend",), "cuda": ("staged", "nccl", UPPER_BOUNDS)},
        on_request=frozenset({"nccl"}),
        is_sized=True,
        is_default=False,
        sizes={"host": (8 << 10,), "cuda": (128 << 10,)},
        max_nbytes=1 << 20,
    ),
    Case(
        "calls",
        "how long the host is busy with an exchange: on CUDA not until it is done",
        ("2 neighbors, 1 field", "26 neighbors, 16 fields"),
        {"host": (), "cuda": (UPPER_BOUNDS,)},
        module="halo",
        is_default=False,
    ),
)

#: Every case by its name, in the order of a full run.
CASES = {case.name: case for case in _ALL}

#: The cases of a run that names none.
DEFAULT_CASES = tuple(case.name for case in _ALL if case.is_default)

#: What baselines do whose names do not tell it.
BASELINE_NOTES = {
    "alone": "the same program without the exchange",
    "called": "the exchange, called without JAX",
    "ceilings": "upper bounds: what the machine can do with no order in it, or with no data",
    "counters": "the order alone, by stream memory operations",
    "first axis": "faces that are one piece of memory each",
    "float": "MPI of a number that is read from the GPU, and written back",
    "handles": "an allgather of memory handles, and opening those of the neighbors",
    "memcpy": "a bare copy between the same places",
    "mpi": "MPI that is given GPU memory",
    "naive": "MPI through the host, each face copied by itself",
    "packed": "MPI that is given GPU memory into which faces were packed",
    "staged": "MPI through the host, all faces in one copy to pinned memory and one back",
    "window": "windows in turn, in the order of start, complete, post and wait",
}

#: Every baseline that some case has on some backend.
BASELINES = tuple(
    sorted({name for case in _ALL for names in case.baselines.values() for name in names})
)

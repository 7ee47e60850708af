"""The catalog: what each case times, and against which baselines; other packages may add to it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Case:
    """One case, as ``list`` shows it."""

    name: str
    summary: str  # what it times, in one line
    baselines: dict[str, tuple[str, ...]]  # for each backend
    run: str  # "module:function", which all ranks call with the session and the case
    # The baselines that run only if the command line names them, or all: they take long to set up.
    on_request: frozenset[str] = frozenset()
    is_sized: bool = False  # whether it runs once for each size
    is_default: bool = False  # whether it runs where no case is named
    # The sizes in bytes on each backend of a run that names none; by default those of `Options`.
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    max_nbytes: int | None = None  # a larger size runs only if the command line names it
    naxes: int = 0  # of a halo case, to which --width, --fields and --corners apply
    note: str = ""  # what is timed under names that do not tell it


@dataclass(frozen=True)
class Usage:
    """How a variant uses a library: by which class, and how its step is run."""

    kind: str
    is_captured: bool = False  # into a graph
    in_place: bool = False  # the fields are memory of the library, and nothing is packed


@dataclass(frozen=True)
class Baseline:
    """A library in a module of its own, or a baseline with a name to explain."""

    note: str = ""  # what it does, where the name does not tell it
    module: str = ""  # that has the class of a library
    usages: dict[str, Usage] = field(
        default_factory=dict
    )  # the variants of a library, by their names


_MPI_ON_REQUEST = frozenset({"mpi"})
_HALO1D = Case(
    "halo1d",
    "ghosts of blocks in a cart of one axis, n cells a rank along each",
    {
        "host": ("sendrecv", "isend", "persistent", "neighborhood", "datatypes"),
        "cuda": ("staged", "mpi", "nccl"),
    },
    "mpishare.bench.halo:run",
    on_request=_MPI_ON_REQUEST,
    is_sized=True,
    is_default=True,
    naxes=1,
)
_REDISTRIBUTE = Case(
    "redistribute",
    "n * n * n complex128, cut along the first axis, then the second",
    {
        "host": ("alltoallw", "alltoallv"),
        "cuda": ("staged", "mpi", "nccl"),
    },
    "mpishare.bench.redistribute:run",
    on_request=_MPI_ON_REQUEST,
    is_sized=True,
    sizes={"host": (64 << 10, 1 << 20), "cuda": (256 << 10, 2 << 20, 16 << 20, 128 << 20)},
    note="size: of a rank's part; private: any arrays; windows: arrays in windows",
)
#: Every case by its name, in the order of a full run.
CASES = {
    case.name: case
    for case in (
        Case(
            "setup",
            "making a node, a window and a plan; closing them is not counted",
            {"host": ("allocate_shared",), "cuda": ()},
            "mpishare.bench.setup:run",
            is_default=True,
        ),
        Case(
            "fence",
            "Window.fence: every rank's work before every rank's next",
            {"host": ("barrier",), "cuda": ("barrier",)},
            "mpishare.bench.fence:run",
            is_default=True,
        ),
        _HALO1D,
        # A volume grows as the cube of a face's side: at the largest sizes, gigabytes per rank.
        replace(
            _HALO1D,
            name="halo3d",
            summary="ghosts of blocks in a cart of three axes, n cells a rank along each",
            sizes={"host": (4 << 10, 64 << 10), "cuda": (4 << 10, 64 << 10, 1 << 20)},
            max_nbytes=1 << 20,
            naxes=3,
        ),
        Case(
            "allreduce",
            "the sum over all ranks of an array, in place",
            {"host": ("allreduce",), "cuda": ("staged", "float", "mpi", "nccl")},
            "mpishare.bench.allreduce:run",
            on_request=_MPI_ON_REQUEST,
            is_sized=True,
            is_default=True,
            sizes={
                "host": (8, 1 << 10, 64 << 10, 1 << 20),
                "cuda": (8, 128, 1 << 10, 16 << 10, 256 << 10, 1 << 20, 16 << 20, 64 << 20),
            },
        ),
        _REDISTRIBUTE,
        replace(
            _REDISTRIBUTE,
            name="permuted",
            summary="the same, its result with axes in the order 1, 2, 0",
        ),
        Case(
            "allgather",
            "the arrays of all ranks brought to every rank",
            {"host": ("allgather",), "cuda": ("staged", "mpi", "nccl")},
            "mpishare.bench.redistribute:run",
            on_request=_MPI_ON_REQUEST,
            is_sized=True,
            sizes=dict.fromkeys(("host", "cuda"), (8, 512, 4 << 10, 64 << 10)),
            max_nbytes=1 << 20,
        ),
    )
}
#: By the name of ``--against``; other packages add to them.
BASELINES = {
    "float": Baseline("MPI of a number that is read from the GPU, and written back"),
    "mpi": Baseline(
        "MPI that is given GPU memory", "mpishare.bench.cuda_mpi", {"mpi": Usage("CudaMpi")}
    ),
    "nccl": Baseline(
        module="mpishare.bench.nccl",
        usages={"nccl": Usage("Nccl"), "nccl graph": Usage("Nccl", is_captured=True)},
    ),
    "staged": Baseline("MPI through the host, all faces in one copy to pinned memory and one back"),
}


def default_cases() -> tuple[str, ...]:
    """Return the cases of a run that names none."""
    return tuple(name for name, case in CASES.items() if case.is_default)


def halo_cases() -> str:
    """Return the names of the cases that --width, --fields and --corners apply to."""
    return ", ".join(name for name, case in CASES.items() if case.naxes)


def baselines() -> tuple[str, ...]:
    """Return every baseline that some case has on some backend."""
    every = (names for case in CASES.values() for names in case.baselines.values())
    return tuple(sorted({name for names in every for name in names}))

"""The cases and baselines that stand beside those of `mpishare.bench`."""

from __future__ import annotations

from dataclasses import replace

from mpishare.bench.cases import BASELINES, CASES, Baseline, Case, Usage

BOTH = ("host", "cuda")
#: Libraries between GPUs; "ceilings" is what the machine can do at best.
NEWEST = ("nccl4py", "nvshmem", "torch")
GPU_LIBRARIES = ("mpi", "nccl", *NEWEST)
UPPER_BOUNDS = "ceilings"
#: Those with functions for kernels.
DEVICE_LIBRARIES = ("nccl4py", "nvshmem")


_MESSAGES = Case(
    "messages1d",
    "halos by messages, as to another node, in a cart of one axis",
    {"host": ("persistent",), "cuda": ("staged", "mpi", "nccl")},
    "benchmarks.halos:run_messages",
    on_request=frozenset({"staged", "nccl"}),
    is_sized=True,
    naxes=1,
)
_CASES = (
    Case(
        "ring",
        "both neighbors' faces moved through windows",
        {
            "host": ("isend", "persistent", "sendrecv"),
            "cuda": ("staged", *GPU_LIBRARIES),
        },
        "benchmarks.ring:run",
        on_request=frozenset(GPU_LIBRARIES),
        is_sized=True,
    ),
    _MESSAGES,
    replace(
        _MESSAGES,
        name="messages3d",
        summary="halos by messages, as to another node, in a cart of three axes",
        max_nbytes=16 << 20,
        naxes=3,
    ),
    Case(
        "fresh",
        "a ring's faces, of arrays that are new at each call, beside arrays that are kept",
        {"host": ("sendrecv",), "cuda": ("staged",)},
        "benchmarks.fresh:run",
        is_sized=True,
        sizes={
            "host": (512, 8 << 10, 72 << 10, 1 << 20),
            "cuda": (8, 4 << 10, 64 << 10, 1 << 20),
        },
        max_nbytes=1 << 20,
        naxes=1,
        note="'new arrays' copies the fields into new arrays and exchanges these, as the messages "
        "below do; 'kept, copied' does the same work on arrays that are kept. 'arrays in turn' "
        "exchanges arrays that were made before, more of them than a plan remembers; 'kept array' "
        "one of them, again and again: without a copy, so that messages are no measure of it.",
    ),
    Case(
        "rows",
        "rows of 8 columns to both neighbors, in numbers that only their sender knows",
        {"host": ("sendrecv", "alltoallv"), "cuda": ("staged", "nccl", UPPER_BOUNDS)},
        "benchmarks.rows:run",
        is_sized=True,
        sizes={
            "host": (0, 6400, 64000, 640000, 6400000),
            "cuda": (0, 6400, 640000, 6400000),
        },
        max_nbytes=6400000,
        note="The bytes are those of one side. 'migrate' also looks through the goals of ten times "
        "as many rows, and closes the gaps.",
    ),
    Case(
        "jax",
        "an exchange in each of a hundred steps of a program that JAX has compiled",
        dict.fromkeys(BOTH, ("alone", "called")),
        "benchmarks.jitted:run",
        is_sized=True,
        sizes=dict.fromkeys(BOTH, (8, 4 << 10, 64 << 10)),
        max_nbytes=1 << 20,
    ),
    Case(
        "cg",
        "a pass of conjugate gradients in a box: 3 kernels, an exchange and 2 sums",
        {"host": (), "cuda": ("staged", "nccl", UPPER_BOUNDS)},
        "benchmarks.cg:run",
        on_request=frozenset({"nccl"}),
        is_sized=True,
        sizes={"host": (8 << 10,), "cuda": (128 << 10,)},
        max_nbytes=1 << 20,
    ),
    Case(
        "swap",
        "words both usages between two ranks, in a kernel of one's own and by the host",
        {"host": (), "cuda": DEVICE_LIBRARIES},
        "benchmarks.kernels:run_swap",
        on_request=frozenset(DEVICE_LIBRARIES),
        is_sized=True,
        sizes={"host": (8, 64 << 10), "cuda": (8, 64 << 10, 1 << 20, 16 << 20)},
        max_nbytes=16 << 20,
        note="'kernel' puts, signals and waits, each block its part; 'halo' is a HaloExchange of a "
        "face; 'fence' and 'post .. wait' are a copy into the window, ordered by these calls.",
    ),
    Case(
        "calls",
        "how long the host is busy with an exchange: on CUDA not until it is done",
        {"host": (), "cuda": ()},
        "benchmarks.halos:run_calls",
    ),
)
#: What runs on CUDA, on request, beside the baselines of the package.
_BROUGHT = {
    "halo1d": NEWEST,
    "halo3d": NEWEST,
    "allreduce": DEVICE_LIBRARIES,
    "redistribute": NEWEST,
    "permuted": NEWEST,
    "allgather": ("nccl4py",),
}


def _graphs(arm: str, kind: str) -> dict[str, Usage]:
    """Return a library called, captured into a graph, and in a graph without packing."""
    return {
        arm: Usage(kind),
        f"{arm} graph": Usage(kind, is_captured=True),
        f"{arm} in place": Usage(kind, is_captured=True, in_place=True),
    }


_BASELINES = {
    "nccl4py": Baseline(
        module="benchmarks.nccl_windows",
        usages={
            "nccl windows": Usage("NcclSend"),
            **_graphs("nccl put", "NcclPut"),
            **_graphs("nccl device", "NcclDevice"),
        },
    ),
    "nvshmem": Baseline(module="benchmarks.nvshmem", usages=_graphs("nvshmem", "Nvshmem")),
    "torch": Baseline(module="benchmarks.symmetric", usages=_graphs("torch", "TorchSymmetric")),
    "alone": Baseline("the same program without the exchange"),
    "called": Baseline("the exchange, called without JAX"),
    UPPER_BOUNDS: Baseline(
        "the kernels of a solve, or copies within a GPU: with no exchange and no sum"
    ),
}


def extend() -> None:
    """Add all of it to the catalog, once or again."""
    CASES.update({case.name: case for case in _CASES})
    for name, brought in _BROUGHT.items():
        case = CASES[name]
        on_cuda = tuple(dict.fromkeys((*case.baselines["cuda"], *brought)))
        baselines, on_request = case.baselines | {"cuda": on_cuda}, case.on_request | {*brought}
        CASES[name] = replace(case, baselines=baselines, on_request=on_request)
    BASELINES.update(_BASELINES)

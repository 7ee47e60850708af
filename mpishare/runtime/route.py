"""The routes of cells from rank to rank, with what other code has to know of each."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

from mpishare.coordination.agreement import require_same
from mpishare.coordination.mpi_agreement import CommWatch, agree
from mpishare.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mpi4py import MPI


class Route(str):
    """A route: a string, its name for users and for reports, with its properties."""

    backends: tuple[str, ...]  # of the fields that it serves
    waits_in: Literal["kernel", "stream", "host"]  # for the other rank; no graph records the host
    is_fast: bool  # within a node: users are not warned of it
    needs_peer_memory: bool  # one rank maps GPU memory of the other
    is_of_mpi: bool  # it sends messages, also between nodes
    broader: str  # the name by which ``require=`` allows it too

    def __new__(
        cls,
        name: str,
        *backends: str,
        waits_in: Literal["kernel", "stream", "host"],
        is_fast: bool = False,
        needs_peer_memory: bool = False,
        is_of_mpi: bool = False,
        broader: str = "",
    ) -> Route:
        """Make the record of a route, one of those below."""
        made = super().__new__(cls, name)
        made.backends, made.waits_in, made.is_fast = backends, waits_in, is_fast
        made.needs_peer_memory, made.is_of_mpi = needs_peer_memory, is_of_mpi
        made.broader = broader or name
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return _named, (str(self),)

    @property
    def in_order(self) -> Route:
        """The route instead of this one without a kernel: for some sums, and a rank to itself."""
        return COPY if self.waits_in == "kernel" else self


# The pages make their table of routes of these texts.
FUSED = Route("fused", "cuda", waits_in="kernel", is_fast=True, needs_peer_memory=True)
"""One kernel stores into the neighbors' GPUs, signals, waits and unpacks."""
COPY = Route("copy", "cuda", waits_in="stream", is_fast=True, needs_peer_memory=True)
"""Kernels, and waits of the stream: several ranks on one GPU without MPS, and myself."""
PINNED = Route("pinned", "cuda", waits_in="stream")
"""Through host memory of the node, where GPUs cannot reach each other."""
NCCL = Route("nccl", "cuda", waits_in="stream", is_fast=True)
"""Packed, sent and unpacked on the stream, by NCCL: another node, a GPU for each rank."""
HOST = Route("host", "host", waits_in="host", is_fast=True)
"""Fields in host memory: read out of the neighbor's memory."""
GPU_MESSAGES = Route("mpi-gpu", "cuda", waits_in="host", is_of_mpi=True, broader="mpi")
"""Messages out of GPU memory: another node, where the MPI takes that."""
MESSAGES = Route("mpi", "cuda", "host", waits_in="host", is_of_mpi=True)
"""Messages out of host memory: another node."""


def _named(name: str) -> Route:
    return ROUTES[name]


# Of the cells of a rank to itself in an exchange, which a kernel copies: no route of a plan.
LOCAL = Route("local", "cuda", waits_in="kernel")

ROUTES = {str(each): each for each in (FUSED, COPY, PINNED, NCCL, HOST, GPU_MESSAGES, MESSAGES)}
"""By name, from the fastest on."""

GPU_AWARE = "MPISHARE_GPU_AWARE_MPI"

# A name for users alone: messages, and never out of GPU memory.
MPI_HOST = "mpi-host"


def for_backend(name: str) -> list[Route]:
    """Return the routes of fields of a backend, from the fastest on."""
    return [route for route in ROUTES.values() if name in route.backends]


def slowest(names: Iterable[Route]) -> Route:
    """Return the slowest of some routes; the fastest of all where there are none."""
    found = {*names}
    return [route for route in ROUTES.values() if route in found or route is FUSED][-1]


def between(has_memory: bool, *, is_self: bool, is_time_sliced: bool) -> Route:
    """Return the route of a halo between two ranks of a CUDA node.

    With `is_time_sliced` processes without MPS share a GPU of the node: a kernel that waits for
    another rank would burn the very time slice that this rank needs.
    """
    if not has_memory:
        return PINNED
    return COPY if is_self or is_time_sliced else FUSED


def forced() -> str | None:
    """Return the route that ``MPISHARE_ROUTE`` names; `ValueError` if there is no such route."""
    name = os.environ.get("MPISHARE_ROUTE") or None
    known = (*ROUTES, MPI_HOST)
    if name is not None and name not in known:
        raise ValueError(
            f"the environment variable MPISHARE_ROUTE must be one of {known}, not {name!r}"
        )
    return name


def require_allowed(name: str | None, *, on_gpu: bool) -> None:
    """Raise `UnsupportedError` if fields in this memory cannot take a forced route."""
    allowed = for_backend("cuda" if on_gpu else "host")
    if name not in (None, MPI_HOST, *allowed):
        where = "GPU" if on_gpu else "host"
        raise UnsupportedError(
            f"MPISHARE_ROUTE={name}: fields in {where} memory travel by {' or '.join(allowed)}"
        )


def agree_on_forced(
    comm: MPI.Intracomm, call: str, timeout_s: float, *, on_gpu: bool
) -> str | None:
    """Return the route that all ranks are forced to. Collective, host-blocking.

    Raises on all ranks, as a plan would, for an unknown route, and if ranks differ.
    """
    found: list[str | None] = agree(comm, forced, CommWatch(call, timeout_s))
    require_same(call, [{"MPISHARE_ROUTE": route} for route in found], comm.rank)
    require_allowed(found[0], on_gpu=on_gpu)
    return found[0]


def why_no_gpu_messages() -> str | None:
    """Return why messages cannot begin and end in the memory of a GPU; None where they can.

    MPI 4.1 has an info key for it (``mpi_memory_alloc_kinds``, MPI 4.1, 11.4.3), where the launcher
    was asked for it. How a library was built (``MPIX_Query_cuda_support``) tells less: an Open MPI
    without CUDA takes such pointers where its UCX does. An MPI that does not ends with a
    segmentation fault, so that host memory is used where neither it nor the user says yes.
    """
    from mpi4py import MPI

    said = os.environ.get(GPU_AWARE, "")
    if said not in ("", "0", "1"):
        raise ValueError(f"{GPU_AWARE}={said!r} is neither '0' nor '1'")
    if said:
        return None if said == "1" else f"{GPU_AWARE}=0"
    if tells_cuda(MPI.COMM_WORLD.Get_info().get("mpi_memory_alloc_kinds")):
        return None
    return f"the MPI does not say that it takes pointers to GPU memory, nor does {GPU_AWARE}=1"


def tells_cuda(kinds: str | None) -> bool:
    """Whether an MPI lists memory of GPUs among its kinds.

    As in ``"mpi,system,cuda:device:managed"``; without restrictors a kind is all of its memory.
    """
    for kind in (kinds or "").split(","):
        name, *restrictors = kind.strip().split(":")
        if name == "cuda" and (not restrictors or "device" in restrictors):
            return True
    return False

"""Checks before a node is made: the process, the GPU and its packages, one backend for all."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Any, TypeVar

from mpishare.backends import presence
from mpishare.coordination.agreement import require_same
from mpishare.coordination.mpi_agreement import agree
from mpishare.coordination.watchdog import EXIT_VARIABLE
from mpishare.errors import UnsupportedError
from mpishare.memory.arguments import require_duration
from mpishare.runtime.route import GPU_AWARE

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpishare.coordination.mpi_agreement import Watch

T = TypeVar("T")

log = logging.getLogger("mpishare")

BACKENDS = ("auto", "cuda", "host")
CHECK = "MPISHARE_CHECK"
VARIABLES = (
    "MPISHARE_BACKEND", CHECK, EXIT_VARIABLE, GPU_AWARE, "MPISHARE_HOST_CODE", "MPISHARE_ROUTE",
)  # fmt: skip


def choose_backend(
    all_comm: MPI.Comm, backend: Any, timeout_s: Any, watch: Watch, more: T
) -> tuple[str, str | None, list[T]]:
    """Return the backend of all ranks, and why it is the host backend if it was not asked for.

    Collective over `all_comm`, host-blocking. Also returns what each rank adds, `more`, which JSON
    can hold.
    """
    if all_comm.rank == 0:
        _warn_of_variables()

    def check() -> tuple[dict[str, Any], str | None, T]:
        arguments = _check_arguments(backend, timeout_s)
        return arguments, _why_no_gpu(arguments["backend"]), more

    arguments, lacks, added = map(list, zip(*agree(all_comm, check, watch), strict=True))
    require_same(watch.call, arguments, all_comm.rank)
    if arguments[0]["backend"] == "host":
        return "host", None, added
    lacking = {rank: missing for rank, missing in enumerate(lacks) if missing}
    if not lacking:
        return "cuda", None, added
    rank, why = next(iter(lacking.items()))
    if len(lacking) < all_comm.size and all_comm.rank == 0:
        log.warning(
            "all ranks use the host backend, though %d of %d have a GPU: rank %d: %s",
            all_comm.size - len(lacking),
            all_comm.size,
            rank,
            why,
        )
    return "host", why, added


def _warn_of_variables() -> None:
    """Warn of variables that look like mpishare's and are not, probably by a typing error."""
    for name in sorted(os.environ):
        if name.startswith("MPISHARE_") and name not in VARIABLES:
            known = ", ".join(VARIABLES)
            log.warning("the environment variable %s is ignored: mpishare knows %s", name, known)


def _check_arguments(backend: Any, timeout_s: Any) -> dict[str, Any]:
    forced = os.environ.get("MPISHARE_BACKEND")
    wanted = forced or backend
    if wanted not in BACKENDS:
        name = "the environment variable MPISHARE_BACKEND" if forced else "backend"
        raise ValueError(f"{name} must be one of {BACKENDS}, not {wanted!r}")
    require_duration("", timeout_s)
    version = sys.modules["mpishare"].__version__  # or later calls would not fit
    return {"backend": wanted, "timeout_s": timeout_s, "mpishare": version}


def is_check_asked() -> bool:
    """Whether this rank's environment asks for the checker of accesses (`mpishare.tools`)."""
    value = os.environ.get(CHECK, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{CHECK}={value!r} is neither '0' nor '1'")
    return value == "1"


def _why_no_gpu(wanted: str) -> str | None:
    if wanted == "host":
        return None

    why = missing()
    if wanted == "cuda" and why:
        forced = " (MPISHARE_BACKEND)" if os.environ.get("MPISHARE_BACKEND") else ""
        raise UnsupportedError(f"backend='cuda'{forced} failed: {why}")
    return why


def missing() -> str | None:
    """Return why no GPU can be used here; None where one can. Makes no context.

    Raises `UnsupportedError` if there is a GPU, but not the Python packages to use it.
    """
    why = presence.why_no_gpu()
    if not why:
        check_packages(presence.driver_major(), *_package_versions())
    return why


def _package_versions() -> tuple[str | None, int | None]:
    import importlib.metadata  # slow, and not needed without a GPU

    bindings: str | None
    runtime: int | None
    try:
        bindings = importlib.metadata.version("cuda-bindings")
    except importlib.metadata.PackageNotFoundError:
        bindings = None
    try:
        import cupy

        runtime = cupy.cuda.runtime.runtimeGetVersion() // 1000
    except ImportError:
        runtime = None
    return bindings, runtime


def check_packages(driver: int, bindings: str | None, runtime: int | None) -> None:
    """Raise unless CuPy and cuda-bindings fit the driver and each other.

    `driver` and `runtime` are CUDA's major versions of the driver and of CuPy; None for a missing
    package.
    """
    major = int(bindings.split(".")[0]) if bindings else None
    # A driver runs packages of older majors, and a second CuPy would break the one that is here.
    usable = (each for each in (runtime, major) if each is not None and each <= driver)
    todo = f"Do: python -m pip install 'mpishare[cu{next(usable, driver)}]'"
    if runtime is None or bindings is None:
        lacking = "CuPy" if runtime is None else "cuda-bindings"
        raise UnsupportedError(f"there is a GPU (CUDA {driver} driver), but no {lacking}. {todo}")
    if runtime > driver or major != runtime:
        raise UnsupportedError(
            f"cuda-bindings {bindings} and CuPy for CUDA {runtime} do not fit together on a "
            f"driver of CUDA {driver}: both must be of one major version, and none newer than the "
            f"driver's. {todo}"
        )


_forks_of_mpi: list[int] = []


def _after_fork() -> None:
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():
        _forks_of_mpi.append(os.getpid())


os.register_at_fork(after_in_child=_after_fork)


def check_fork() -> None:
    """Raise `UnsupportedError` with the remedy in a process that was forked from one with MPI."""
    if _forks_of_mpi:
        raise UnsupportedError(
            "Node() was called in a forked process. MPI and CUDA do not survive a fork: make the "
            "node in the process that started MPI, and start others with the `spawn` method."
        )

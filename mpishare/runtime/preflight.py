"""Checks before a node is made: the process, its launcher, the GPU and its packages, one backend.

A launcher and an MPI library with different protocols make N processes that are each alone, without
an error of MPI.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from mpishare.backends import presence
from mpishare.coordination.agreement import require_same
from mpishare.coordination.mpi_agreement import agree
from mpishare.coordination.watchdog import EXIT_VARIABLE
from mpishare.errors import UnsupportedError
from mpishare.memory.arguments import require_duration
from mpishare.runtime.route import GPU_AWARE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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


# --- forks and launchers

_is_fork_of_mpi = False


def _after_fork() -> None:
    global _is_fork_of_mpi
    mpi = sys.modules.get("mpi4py.MPI")
    _is_fork_of_mpi |= mpi is not None and mpi.Is_initialized()


os.register_at_fork(after_in_child=_after_fork)


def check_fork() -> None:
    """Raise `UnsupportedError` with the remedy in a process that was forked from one with MPI."""
    if _is_fork_of_mpi:
        raise UnsupportedError(
            "Node() was called in a forked process. MPI and CUDA do not survive a fork: make the "
            "node in the process that started MPI, and start others with the `spawn` method."
        )


class NoMpiError(UnsupportedError):
    """There is no MPI library: the reason and the remedy in one line."""


def load_mpi() -> Any:
    """Import MPI, which starts it, or raise `NoMpiError`."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        # The first line has the reason; the others list the attempts of the loader.
        raise NoMpiError(
            f"no MPI can be loaded: {str(error).splitlines()[0]}. Load that of your cluster, or "
            "install one: pip install mpich"
        ) from None
    return MPI


@dataclass(frozen=True)
class Launcher:
    name: str
    variable: str  # of the environment, with the number of processes
    count: int
    rank: int

    @property
    def is_srun(self) -> bool:
        """Whether SLURM started the ranks itself, without an mpirun in between."""
        return self.variable == "SLURM_STEP_NUM_TASKS"


_LAUNCHERS = (
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("MPICH's mpirun (or another that speaks PMI)", "PMI_SIZE", "PMI_RANK"),
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)


def find_launcher(environment: Mapping[str, str]) -> Launcher | None:
    """Return the launcher that is nearest to this process; None where it was started by hand.

    An mpirun in a job starts its helpers by srun, one per node: SLURM's variables in such a process
    describe these helpers. And srun with `--mpi=pmi2` sets the variables of an mpirun.
    """
    is_of_srun = "SLURM_STEP_NUM_TASKS" in environment and "MPI_LOCALNRANKS" not in environment
    for name, variable, rank in _LAUNCHERS:
        if variable in environment and not (variable == "PMI_SIZE" and is_of_srun):
            count = number_in(environment, variable, 1)
            return Launcher(name, variable, count, number_in(environment, rank, 0))
    return None


def number_in(environment: Mapping[str, str], variable: str, default: int) -> int:
    """Return a number that a launcher has put into the environment."""
    text = environment.get(variable, "")
    return int(text) if text.isdecimal() else default


def srun_option(library: str) -> str | None:
    """Return the option of srun for the protocol of an MPI library, None for an unknown library.

    `library` is the text of ``MPI.Get_library_version()``.
    """
    if "Open MPI" in library:
        return "--mpi=pmix"
    if "CRAY MPICH" in library.upper():
        return "--mpi=cray_shasta"
    return "--mpi=pmi2" if "MPICH" in library else None


def check_singleton(world_size: int, environment: Mapping[str, str], library: str) -> None:
    """Raise `UnsupportedError` if this process believes to be alone where a launcher started
    several.

    With the option that was missing; on all processes but the first in short.
    """
    launcher = find_launcher(environment)
    if world_size != 1 or launcher is None or launcher.count <= 1:
        return
    cure = _cure(launcher, environment, library)
    if launcher.rank:
        raise UnsupportedError(
            f"process {launcher.rank} of {launcher.count} is alone in MPI.COMM_WORLD, as the first "
            f"one says: {cure}"
        )
    first_line = library.partition("\n")[0].strip("\x00 ")
    raise UnsupportedError(
        f"{launcher.name} started {launcher.count} processes ({launcher.variable}="
        f"{launcher.count}), but each is alone in MPI.COMM_WORLD: the launcher and the MPI library "
        f"({first_line}) do not speak the same protocol. {cure[0].upper()}{cure[1:]}."
    )


def _cure(launcher: Launcher, environment: Mapping[str, str], library: str) -> str:
    if not launcher.is_srun:
        return "start it with the mpirun of the MPI library that mpi4py uses"
    option = srun_option(library)
    if option is None:
        return "give srun the --mpi= of this library; `srun --mpi=list` shows what there is"
    if option == f"--mpi={environment.get('SLURM_MPI_TYPE')}":
        return (
            f"srun was given {option}, which is right, but the versions do not fit: try the others "
            "that `srun --mpi=list` shows, or the mpirun of this library"
        )
    return f"give srun {option}"


def one_gpu_note(uuids: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Return a note if all ranks of a node use one GPU of a SLURM job that has more."""
    if len(uuids) < 2 or not uuids[0] or len(set(uuids)) > 1:
        return None
    # A step's own variable lists its GPUs alone; a job script, and so mpirun, has also the job's.
    listed = [each for each in environment.get("SLURM_JOB_GPUS", "").split(",") if each]
    n_gpus = max(len(listed), number_in(environment, "SLURM_GPUS_ON_NODE", 0))
    if n_gpus < 2:
        return None
    return (
        f"all {len(uuids)} ranks use {uuids[0][:12]}, though this job has {n_gpus} GPUs here: ask "
        f"for --gpus-per-node={n_gpus} alone, without --gpus-per-task and --gpu-bind. To SLURM "
        "mpirun is one task, to which --gpus-per-task=1 gives one GPU"
    )

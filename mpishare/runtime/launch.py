"""The launcher of this process, and whether it fits the MPI library.

A launcher and a library with different protocols make N processes that are each alone, without an
error of MPI.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpishare.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


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

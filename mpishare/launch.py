"""Whether the job was launched as it was meant: N ranks, not N jobs of one rank each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpishare.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

_COUNTS = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
    "PMI_SIZE": "a launcher that speaks PMI (MPICH's mpirun, srun --mpi=pmi2)",
    "SLURM_STEP_NUM_TASKS": "srun",
}


def check_singleton(world_size: int, environment: Mapping[str, str], library: str) -> None:
    """Raise if this process believes to be alone where a launcher started several. Local.

    Parameters
    ----------
    world_size : int
        Of ``MPI.COMM_WORLD``.
    environment : mapping
        The process's.
    library : str
        The MPI library in use, for the error.

    Raises
    ------
    UnsupportedError
        With the option that was missing.
    """
    if world_size != 1:
        return
    for name, launcher in _COUNTS.items():
        count = environment.get(name, "1")
        if count.isdecimal() and int(count) > 1:
            todo = (
                "Give srun --mpi=pmi2 (MPICH) or --mpi=pmix (Open MPI 5); `srun --mpi=list` shows "
                "what there is"
                if name == "SLURM_STEP_NUM_TASKS"
                else "Start it with the mpirun of the MPI library that mpi4py uses"
            )
            raise UnsupportedError(
                f"{launcher} started {count} processes ({name}={count}), but each is alone in "
                f"MPI.COMM_WORLD: the launcher and the MPI library ({library}) do not speak the "
                f"same protocol. {todo}."
            )

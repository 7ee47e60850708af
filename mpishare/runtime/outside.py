"""The environment of processes that a rank starts, and that are no ranks themselves."""

from __future__ import annotations

import os
import threading
from typing import Self

# Prefixes of the variables that describe the job to a rank; PMIX_MCA_ and the like are settings of
# the user, and SLURM's variables about the job as a whole stay true.
_OF_THE_JOB = (
    "HYDI_", "MPI_LOCAL", "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "PMI", "PRTE_",
    "SLURM_LOCALID", "SLURM_MPI_TYPE", "SLURM_PMI", "SLURM_PROCID", "SLURM_STEP",
)  # fmt: skip

_lock = threading.Lock()
_taken: dict[str, str] = {}
# Blocks that all threads are in: the variables come back when the last one ends.
_n_inside = 0


def _is_of_the_job(name: str) -> bool:
    return name.startswith(_OF_THE_JOB) and "_MCA_" not in name


class OutsideEnvironment(dict[str, str]):
    """The variables of a process outside of the job. Made by `outside_environment`."""

    def __enter__(self) -> Self:
        """Remove the launcher's variables from this process, and so from its children."""
        global _n_inside
        with _lock:
            _n_inside += 1
            for name in filter(_is_of_the_job, [*os.environ]):
                _taken[name] = os.environ.pop(name)
        return self

    def __exit__(self, *exception: object) -> None:
        """Restore them, unless another block is still running."""
        global _n_inside
        with _lock:
            _n_inside -= 1
            if not _n_inside:
                os.environ.update(_taken)
                _taken.clear()


def outside_environment() -> OutsideEnvironment:
    """Return the environment for a process that this rank starts and that is no rank itself.

    Local. A child inherits the variables by which the launcher numbers the ranks. If it imports
    ``mpi4py.MPI``, as a child of multiprocessing's "spawn" does where the program imports it at its
    top, MPI starts there as that rank a second time: MPICH ends the child, Open MPI waits for ever.
    Without these variables the child is a job of its own, of one rank.

    Returns
    -------
    dict
        A copy of ``os.environ`` without the launcher's variables, for ``subprocess``: ``env=``. It
        is also a context manager, within which ``os.environ`` itself has none of them: for
        processes that multiprocessing and concurrent.futures start. Other threads see that too.

    Examples
    --------
    >>> with mpishare.outside_environment():
    ...     process.start()
    >>> subprocess.run(command, env=mpishare.outside_environment())
    """
    with _lock:  # another thread may be removing some
        kept = {name: text for name, text in os.environ.items() if not _is_of_the_job(name)}
    return OutsideEnvironment(kept)

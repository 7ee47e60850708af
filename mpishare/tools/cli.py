"""Command-line programs under mpirun: rank 0 prints, and a rank that raises aborts all ranks."""

from __future__ import annotations

import argparse
import faulthandler
import os
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

from mpishare.coordination.abort import abort, say
from mpishare.memory.arguments import MAX_DURATION_S, is_duration
from mpishare.runtime.preflight import NoMpiError, load_mpi

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from mpi4py import MPI

# Where launchers put the rank of a process, for output before MPI is started.
_RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


class UsageError(Exception):
    """A wrong command line; the message is one line for the user."""


def is_first_process() -> bool:
    """Return whether this process is rank 0 to the launcher, or was started without one.

    Reads the environment and does not start MPI.
    """
    for variable in _RANK_VARIABLES:
        if variable in os.environ:
            return os.environ[variable] == "0"
    return True


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `UsageError`, and prints its help on one rank only."""

    def error(self, message: str) -> NoReturn:
        """Raise the error that argparse would print on every rank."""
        raise UsageError(message)

    def _print_message(self, message: str, file: Any = None) -> None:
        if is_first_process():
            super()._print_message(message, file)


def seconds(text: str) -> float:
    """Parse a deadline, a positive number: an argument type for `Parser`."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not is_duration(value):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a positive number of seconds up to {MAX_DURATION_S:g}"
        )
    return value


def tell(prog: str, text: object) -> None:
    """Print a line of a program on stderr, whether or not somebody reads it."""
    say(f"{prog}: {text}\n")


def aligned(lines: Sequence[Sequence[str]], left: Collection[int]) -> list[str]:
    """Return the lines of a table, whose columns stand to the right unless they are in `left`."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if index in left else text.rjust(width)
            for index, (text, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in lines
    ]


def fail_usage(prog: str, message: str) -> int:
    """Print the usage error on rank 0, and return exit status 2.

    Collective, host-blocking: a launcher ends the job at the first nonzero exit status, so no rank
    may exit before rank 0 has printed.
    """
    comm = start_mpi().COMM_WORLD
    if comm.rank == 0:
        tell(prog, f"{message} (--help says more)")
    comm.Barrier()
    return 2


def fail_run(prog: str, comm: MPI.Intracomm, error: Exception) -> int:
    """Print why the node could not be made or the report not written, and return exit status 1.

    Not collective. Where the node fails, every rank raises, and rank 0, whose error names the
    errors of the others, prints alone. After a timeout each rank prints, since rank 0 may be the
    missing one.
    """
    if comm.rank == 0 or isinstance(error, TimeoutError):
        tell(prog, error)
    return 1


def mpi_library() -> str:
    """Return the version text of the MPI library, without starting MPI."""
    import mpi4py

    mpi4py.rc.initialize = False
    return str(start_mpi().Get_library_version())


def start_mpi() -> Any:
    """Import MPI, which starts it; end the process where there is no MPI."""
    try:
        return load_mpi()
    except NoMpiError as error:
        say(f"{error}\n")
        raise SystemExit(1) from None


def start_mpi_in_time(deadline_s: float) -> None:
    """Start MPI; end the process, with a traceback, where it has not started by the deadline.

    MPICH waits for ever where the ranks of a machine have different /dev/shm.
    """
    faulthandler.dump_traceback_later(deadline_s, exit=True)  # no Python runs within `MPI_Init`
    start_mpi()
    faulthandler.cancel_dump_traceback_later()


def run_on_ranks(body: Callable[[MPI.Intracomm], int]) -> int:
    """Start MPI, call ``body(COMM_WORLD)``, and return its exit status.

    Collective. An exception that `body` does not handle prints its traceback and ends the whole job
    with status 1: the other ranks would otherwise wait for this one forever.
    """
    comm = start_mpi().COMM_WORLD
    try:
        return body(comm)
    except SystemExit:
        raise
    except BaseException:
        say(f"rank {comm.rank} of {comm.size}:\n{traceback.format_exc()}")
        abort("")
        raise

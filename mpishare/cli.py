"""Command-line programs under mpirun: rank 0 prints, and a rank that raises aborts all ranks."""

from __future__ import annotations

import argparse
import math
import os
import sys
import traceback
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from mpishare.coordination.abort import abort_after, say

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi4py import MPI

# Where launchers put the rank of a process, for output before MPI is started.
_RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


class UsageError(Exception):
    """The command line is wrong; the message is one line for the user."""


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
        """Raise what argparse would print on every rank."""
        raise UsageError(message)

    def _print_message(self, message: str, file: Any = None) -> None:
        if is_first_process():
            super()._print_message(message, file)


def seconds(text: str) -> float:
    """Parse a deadline: an argument type for `Parser`.

    Raises
    ------
    argparse.ArgumentTypeError
        If `text` is not a positive number.
    """
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value


def fail_usage(prog: str, message: str) -> int:
    """Print on rank 0 what is wrong with the command line, and return exit status 2.

    Collective, host-blocking: a launcher ends the job at the first nonzero exit status, so no rank
    may exit before rank 0 has printed.
    """
    comm = _world()
    if comm.rank == 0:
        sys.stderr.write(f"{prog}: {message} (--help says more)\n")
        sys.stderr.flush()
    comm.Barrier()
    return 2


def fail_run(prog: str, comm: MPI.Intracomm, error: Exception) -> int:
    """Print why the node could not be made or the report not written, and return exit status 1.

    Local. Where the node fails, every rank raises, and the error of rank 0 names those of the
    others: it alone prints. After a timeout each rank prints, since rank 0 may be the missing one.
    """
    if comm.rank == 0 or isinstance(error, TimeoutError):
        sys.stderr.write(f"{prog}: {error}\n")
        sys.stderr.flush()
    return 1


def _world() -> MPI.Intracomm:
    """Start MPI and return COMM_WORLD, or end the process where there is no MPI."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        # The first line has the reason; the others list what the loader tried.
        sys.stderr.write(
            f"no MPI can be loaded: {str(error).splitlines()[0]}. Load that of your cluster, or "
            "install one: pip install mpich\n"
        )
        raise SystemExit(1) from None
    return MPI.COMM_WORLD


def is_terminal(stream: TextIO) -> bool:
    """Return whether `stream` is a user's terminal.

    Open MPI gives each rank a pseudo-terminal; that one has no size.
    """
    return stream.isatty() and os.get_terminal_size(stream.fileno()).columns > 0


def run_on_ranks(body: Callable[[MPI.Intracomm], int]) -> int:
    """Start MPI, call ``body(COMM_WORLD)``, and return its exit status.

    Collective. An exception that `body` does not handle prints its traceback and ends the whole job
    with status 1: the other ranks would otherwise wait for this one forever.
    """
    comm = _world()
    try:
        return body(comm)
    except SystemExit:
        raise
    except BaseException:
        text = f"rank {comm.rank} of {comm.size}:\n{traceback.format_exc()}"
        abort_after(lambda: say(text))
        raise

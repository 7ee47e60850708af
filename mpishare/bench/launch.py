"""A command line under mpirun: one rank speaks, and a rank that raises takes the others along."""

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

# What the launchers tell a process about its rank, for the words that need no MPI.
_RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


class UsageError(Exception):
    """The command line is wrong; the text is one line for the user."""


def is_first_process() -> bool:
    """Whether the launcher calls this process rank 0, or there is no launcher.

    Local: reads the environment and does not start MPI.
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
    """Read a deadline: an argument type for `Parser`.

    Local.

    Raises
    ------
    argparse.ArgumentTypeError
        If `text` is no positive number.
    """
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds") from None
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of seconds")
    return value


def fail_usage(prog: str, message: str) -> int:
    """Say on rank 0 what is wrong with the command line; the exit status is 2.

    Collective, host-blocking: a launcher ends the job at the first status that is not 0, so that
    no rank may leave before rank 0 has spoken.
    """
    comm = _world()
    if comm.rank == 0:
        sys.stderr.write(f"{prog}: {message} (--help says more)\n")
        sys.stderr.flush()
    comm.Barrier()
    return 2


def fail_run(prog: str, comm: MPI.Intracomm, error: Exception) -> int:
    """Say on rank 0 why there is no node, or no file of the report; the exit status is 1.

    Local. Without a node every rank raises, and what rank 0 raises has the words of the others in
    it. Only of a rank that is missing nobody knows who else heard.
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
        # The first line says it; those below are what the loader tried.
        sys.stderr.write(
            f"no MPI can be loaded: {str(error).splitlines()[0]}. Load that of your cluster, or "
            "install one: pip install mpich\n"
        )
        raise SystemExit(1) from None
    return MPI.COMM_WORLD


def is_terminal(stream: TextIO) -> bool:
    """Whether somebody looks at `stream`.

    Local. Open MPI gives the ranks a terminal of its own; that one has no size.
    """
    return stream.isatty() and os.get_terminal_size(stream.fileno()).columns > 0


def run_on_ranks(body: Callable[[MPI.Intracomm], int]) -> int:
    """Start MPI, call ``body(COMM_WORLD)``, and return its exit status.

    Collective. An exception that `body` does not handle ends the whole job with status 1 after its
    traceback: the other ranks would wait for this one for ever.
    """
    comm = _world()
    try:
        return body(comm)
    except SystemExit:
        raise
    except BaseException:
        words = f"rank {comm.rank} of {comm.size}:\n{traceback.format_exc()}"
        abort_after(lambda: say(words))
        raise

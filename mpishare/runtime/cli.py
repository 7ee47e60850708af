"""Command-line programs under mpirun: rank 0 prints, and a rank that raises aborts all ranks."""

from __future__ import annotations

import argparse
import os
import stat
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from mpishare.coordination.abort import abort_after, is_output_read, say, wait_briefly
from mpishare.errors import format_nbytes
from mpishare.memory.arguments import MAX_DURATION_S, is_duration
from mpishare.runtime.mpi_start import NoMpiError, limited_start, load_mpi
from mpishare.runtime.surroundings import ancestors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mpi4py import MPI

# Where launchers put the rank of a process, for output before MPI is started.
_RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
# Programs that read the output of the ranks they started, and write it to their own.
_LAUNCHERS = ("mpirun", "mpiexec", "orterun", "prterun")

#: Move to the line above, and empty it.
_UP = "\x1b[1A\x1b[2K"


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


def start_mpi_in_time(prog: str, deadline_s: float) -> None:
    """Start MPI; end the process, with the reason, where it cannot start here or is late."""
    with limited_start(prog, deadline_s, is_first=is_first_process()):
        start_mpi()


def columns_of(stream: TextIO) -> int:
    """Return the columns of the terminal that shows `stream` to a person, 0 without one.

    A launcher gives its ranks pipes, or pseudo-terminals without a size; then the terminal is its
    own, if it writes to one.
    """
    try:
        fd = stream.fileno()
    except (OSError, ValueError):
        return 0  # no file, or closed
    if stream.isatty():
        columns = os.get_terminal_size(fd).columns
    elif stat.S_ISFIFO(os.fstat(fd).st_mode):
        columns = 0
    else:
        return 0
    return columns or _columns_of_launcher(fd)


def _columns_of_launcher(fd: int) -> int:
    """Return the columns of the terminal that is `fd` of the launcher, 0 where there is none."""
    launcher = next((pid for pid, name in ancestors() if name.startswith(_LAUNCHERS)), 0)
    path = Path(f"/proc/{launcher}/fd/{fd}")  # there is none of process 0
    try:
        if not path.is_char_device():
            return 0
        terminal = os.open(path, os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:
        return 0  # of another user
    try:
        return os.get_terminal_size(terminal).columns if os.isatty(terminal) else 0
    finally:
        os.close(terminal)


class Progress:
    """A line on the stderr of rank 0 where a person sees it.

    It is drawn by these calls alone, between timed blocks, so that it takes no time from them.
    Every write ends its line, since Open MPI passes on whole lines.
    """

    def __init__(self, *, is_shown: bool) -> None:
        self._columns = columns_of(sys.stderr) if is_shown else 0
        self._is_drawn = False
        self._done = self._turns = 0

    def expect(self, turns: int) -> None:
        self._turns = turns

    def show(self, case: str, nbytes: int, variant: str) -> None:
        if self._columns:
            size = f" {format_nbytes(nbytes)}" if nbytes else ""
            line = f"{100 * self._done // max(self._turns, 1):3d} %  {case}{size}: {variant}"
            self._write(line[: self._columns - 1])
            self._is_drawn = True

    def advance(self, turns: int = 1) -> None:
        """Count turns: in each every variant has run once more."""
        self._done += turns

    def _write(self, line: str) -> None:
        sys.stderr.write(f"{_UP if self._is_drawn else ''}{line}\n")
        sys.stderr.flush()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Remove the line during output to stdout, which may be the same terminal."""
        self.close()
        yield
        sys.stdout.flush()
        if self._columns:
            wait_briefly(is_output_read)

    def close(self) -> None:
        if self._is_drawn:
            self._write("")
            # Two pipes lead to one terminal: later output must not overtake this.
            wait_briefly(is_output_read)
            self._is_drawn = False


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
        text = f"rank {comm.rank} of {comm.size}:\n{traceback.format_exc()}"
        abort_after(lambda: say(text))
        raise

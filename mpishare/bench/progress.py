"""A line of progress where a person sees it."""

from __future__ import annotations

import os
import stat
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from mpishare.errors import format_nbytes
from mpishare.runtime.surroundings import ancestors
from mpishare.tools.cli import wait_for_reader

if TYPE_CHECKING:
    from collections.abc import Iterator

# Programs that read the output of the ranks they started, and write it to their own.
_LAUNCHERS = ("mpirun", "mpiexec", "orterun", "prterun")

#: Move to the line above, and empty it.
_UP = "\x1b[1A\x1b[2K"


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
            wait_for_reader()

    def close(self) -> None:
        if self._is_drawn:
            self._write("")
            # Two pipes lead to one terminal: later output must not overtake this.
            wait_for_reader()
            self._is_drawn = False

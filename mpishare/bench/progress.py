"""The progress bar on stderr, where a person sees it."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mpishare.cli import columns_of
from mpishare.coordination.abort import is_output_read, wait_briefly
from mpishare.errors import format_nbytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.progress import Progress as Bar

#: Move to the line above, and empty it.
_UP = "\x1b[1A\x1b[2K"


class Progress:
    """A progress bar on the stderr of rank 0 where a person sees it, else nothing.

    It is drawn by these calls alone, between timed blocks, so that it takes no time from them.
    Every write ends its line, since Open MPI passes on whole lines.
    """

    def __init__(self, *, is_shown: bool) -> None:
        self._bar: Bar | None = None
        self._lines = 0  # of the terminal that it takes now
        columns = columns_of(sys.stderr) if is_shown else 0
        if columns:
            from rich.console import Console
            from rich.progress import Progress as Bar

            self._bar = Bar(console=Console(stderr=True, force_terminal=True, width=columns))

    def expect(self, turns: int) -> None:
        """Set how often `advance` will be called."""
        if self._bar is not None:
            self._task = self._bar.add_task("", total=turns)

    def show(self, case: str, nbytes: int, variant: str) -> None:
        """Show what is being timed."""
        if self._bar is not None:
            size = f" {format_nbytes(nbytes)}" if nbytes else ""
            self._bar.update(self._task, description=f"{case}{size}: {variant}")
            with self._bar.console.capture() as frame:
                self._bar.console.print(self._bar)
            sys.stderr.write(_UP * self._lines + frame.get())
            sys.stderr.flush()
            self._lines = frame.get().count("\n")

    def advance(self, turns: int = 1) -> None:
        """Advance the bar: every variant has run once more."""
        if self._bar is not None:
            self._bar.advance(self._task, turns)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Remove the bar for what goes to stdout, which may be the same terminal."""
        self.close()
        yield
        sys.stdout.flush()
        if self._bar is not None:
            wait_briefly(is_output_read)

    def close(self) -> None:
        """Remove the bar."""
        if self._lines:
            sys.stderr.write(_UP * self._lines + "\n")
            sys.stderr.flush()
            # Two pipes lead to one terminal: what comes next must not overtake this.
            wait_briefly(is_output_read)
            self._lines = 0

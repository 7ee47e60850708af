"""The progress bar on stderr, where that is a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from mpishare.cli import is_terminal
from mpishare.errors import format_nbytes

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


class Progress:
    """A progress bar on the stderr of rank 0 where that is a terminal, else nothing."""

    def __init__(self, *, is_shown: bool) -> None:
        self._bar: Bar | None = None
        if is_shown and is_terminal(sys.stderr):
            from rich.console import Console
            from rich.progress import Progress as Bar

            self._bar = Bar(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("node", total=None)

    def expect(self, turns: int) -> None:
        """Show the bar, and set how often `advance` will be called."""
        if self._bar is not None:
            self._bar.update(self._task, total=turns)
            self._bar.start()

    def show(self, case: str, nbytes: int, variant: str) -> None:
        """Show what is being timed."""
        if self._bar is not None:
            size = f" {format_nbytes(nbytes)}" if nbytes else ""
            self._bar.update(self._task, description=f"{case}{size}: {variant}")

    def advance(self) -> None:
        """Advance the bar: every variant has run once more."""
        if self._bar is not None:
            self._bar.advance(self._task)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()

"""The bar on stderr, where that is a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from mpishare.bench.launch import is_terminal
from mpishare.bench.words import nbytes_words

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from rich.progress import Progress as Bar


class Progress:
    """A bar on rank 0's stderr where that is a terminal, else nothing.

    Local.
    """

    def __init__(self, *, is_shown: bool) -> None:
        self._bar: Bar | None = None
        if is_shown and is_terminal(sys.stderr):
            from rich.console import Console
            from rich.progress import Progress as Bar

            self._bar = Bar(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("node", total=None)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def expect(self, turns: int) -> None:
        """Say how often `advance` will be called."""
        if self._bar is not None:
            self._bar.update(self._task, total=turns)

    def show(self, case: str, nbytes: int, arm: str) -> None:
        """Say what is being timed."""
        if self._bar is not None:
            size = f" {nbytes_words(nbytes)}" if nbytes else ""
            self._bar.update(self._task, description=f"{case}{size}: {arm}")

    def advance(self) -> None:
        """Go on: every arm had its turn."""
        if self._bar is not None:
            self._bar.advance(self._task)

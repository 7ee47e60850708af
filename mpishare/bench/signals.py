"""Signals that end a run of the benchmark early."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi4py import MPI


class StoppedError(Exception):
    """Raised on every rank, at the same place, after rank 0 got a signal that ends the run."""


class Signals:
    """Signals that end a run early, on every rank at the same place.

    No rank may leave an MPI call half-way, where the others would wait for it forever. The first
    signal is kept until `check`, the next of its kind ends the process.
    """

    #: Ctrl-C; what Open MPI makes of it; and one that launchers pass on.
    KEPT = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        #: The signal of rank 0, as far as this rank knows; 0: none.
        self.found = 0
        #: Called on this rank before all are stopped.
        self.first: Callable[[], object] | None = None
        for number in self.KEPT:
            signal.signal(number, self._keep)

    def _keep(self, number: int, frame: object) -> None:  # noqa: ARG002
        self.found = number
        signal.signal(number, signal.SIG_DFL)

    def check(self) -> None:
        """Raise `StoppedError` on every rank if rank 0 got a signal. Collective."""
        self.found = self._comm.bcast(self.found)
        if self.found:
            if self.first is not None:
                self.first()
            raise StoppedError

    @property
    def exit_status(self) -> int:
        """The status of a run that was ended early.

        0 after SIGUSR1, whose sender knows why; Open MPI prints much about other statuses.
        """
        return 0 if self.found == signal.SIGUSR1 else 128 + signal.SIGINT

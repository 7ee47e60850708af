"""Waits of a plan's ranks for each other by messages: who of the node has not come."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from mpishare.waits import SAY_S, LongWait

if TYPE_CHECKING:
    from collections.abc import Collection

    from mpishare.agree import Agreement


_SAID_S = 4 * SAY_S


class Absent:
    """Says in the control block that this rank waits in a call, and reads who else does. Local.

    Parameters
    ----------
    agreement : Agreement
        Of the node.
    mates : collection of int
        The node's ranks that must make the call.
    call : str
        Its name.
    """

    def __init__(self, agreement: Agreement, mates: Collection[int], call: str) -> None:
        self._agreement = agreement
        self._mates = [rank for rank in mates if rank != agreement.rank]
        self._call = call
        self._watch = LongWait(agreement, call)

    def look(self) -> None:
        """Raise if the node is broken or ranks wait in a circle; warn of those that are late."""
        self._agreement.check()
        self._watch.look(self._now)

    def missing(self) -> list[int]:
        """Return who is absent once those that came just now have had the time to say so."""
        until = time.monotonic() + _SAID_S
        while (absent := self._now()) and time.monotonic() < until:
            os.sched_yield()
        return absent

    def __enter__(self) -> Absent:
        """Return itself."""
        return self

    def __exit__(self, *_: Any) -> None:
        """Say that this rank goes on."""
        self._watch.end()

    def _now(self) -> list[int]:
        """Return those that wait in no call of that name."""
        status = self._agreement.block.status
        said = {rank: status(rank) for rank in self._mates}
        return [rank for rank, each in said.items() if each is None or each.call != self._call]

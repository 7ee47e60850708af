"""Memory of other ranks' processes: which of it plans may read, and what a failed read raises."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from mpishare.coordination.life import Event
from mpishare.errors import MpiShareError

if TYPE_CHECKING:
    from mpishare.plans.engine import PlanSetup


class PeerProcesses:
    """The processes of a plan's ranks on this node: `pids` by rank of the plan.

    `unreadable` has why the first of two ranks could not read the second's memory when the node was
    made: the same on all ranks.
    """

    def __init__(self, setup: PlanSetup) -> None:
        self._comm = setup.comm
        report, ranks_here = setup.context.report, setup.comm.ranks_here
        self.pids = {rank: report.members[place].pid for rank, place in ranks_here.items()}
        ranks = {place: rank for rank, place in ranks_here.items()}
        self.unreadable = {
            (ranks[reader], ranks[owner]): why
            for reader, owner, why in report.unreadable
            if reader in ranks and owner in ranks
        }

    def require_read(self, call: str, owner: int, error: int) -> None:
        """Raise if a read failed, or with the owner's own reason if it has left.

        A rank that has left may have freed the memory; if it died, its process id may be reused.
        """
        comm, agreement = self._comm, self._comm.context.agreement
        if error == errno.ESRCH or not agreement.block.is_here(comm.ranks_here[owner]):
            comm.wait(call, lambda: [owner])  # raises, with the reason
        if error:
            text = (
                f"{call} failed: cells in a field of rank {owner} cannot be read: "
                f"{os.strerror(error)}. Fields in windows need no permission to be read."
            )
            raise agreement.life.end_by(Event.EXCEPTION, MpiShareError(text))

"""Memory of other ranks' processes: which of it plans may read, and what a failed read raises."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from mpishare.errors import MpiShareError
from mpishare.plans.node_cache import report_of

if TYPE_CHECKING:
    from mpishare.node import Node
    from mpishare.plans.comm import PlanComm


def unreadable(node: Node) -> dict[tuple[int, int], str]:
    """Return why the first of two ranks of the node could not read the second's memory.

    As it was when the node was made: the same on all ranks.
    """
    around = report_of(node).surroundings
    pairs = around.unreadable if around is not None else ()
    return {(reader, owner): why for reader, owner, why in pairs}


def require_read(comm: PlanComm, call: str, owner: int, error: int) -> None:
    """Raise if a read failed, or with the owner's own reason if it has left.

    A rank that has left may have freed the memory; if it died, its process id may be reused.
    """
    agreement = comm.context.agreement
    if error == errno.ESRCH or not agreement.is_here(comm.ranks_here[owner]):
        comm.wait(call, lambda: [owner])  # raises, with the reason
    if error:
        text = (
            f"{call} failed: cells in a field of rank {owner} cannot be read: "
            f"{os.strerror(error)}. Fields in windows need no permission to be read."
        )
        raise agreement.fail_and_tell(lambda: MpiShareError(text), fatal=False)

"""Case ``faces``: faces across the last axis of a cube beside those across its first.

Both are the same exchange of the same bytes in a ring of ranks. Across the first axis a face is one
contiguous piece of memory, across the last one it is n * n pieces of as many cells as there are
ghosts: how much of the contiguous rate is left is what packing them costs.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mpishare.bench.arm import Entry
from mpishare.bench.cases.halo import each_size
from mpishare.bench.cases.halo_arms import WindowFields
from mpishare.bench.cases.halo_block import Block
from mpishare.bench.contest import contest

if TYPE_CHECKING:
    from mpishare.bench.cases.halo_grid import Grid
    from mpishare.bench.rows import Row
    from mpishare.bench.session import Session


class _LastAxis(WindowFields):
    """An exchange of fields whose cut axis is the last one in memory."""

    # The fields are seen with that axis first, as all of the grid's.
    order = (2, 0, 1)


def run(session: Session) -> list[Row]:
    """Run the case at every size and return its rows. Collective, host-blocking."""
    return each_size(session, "faces", Block.cube, _run_size)


def _run_size(session: Session, case: str, grid: Grid, reason: str | None) -> list[Row]:
    entries = [
        Entry(
            "last axis", partial(_LastAxis, grid), grid.sent_nbytes, ("first axis",), unfit=reason
        ),
        Entry(
            "first axis", partial(WindowFields, grid), grid.sent_nbytes, kind="rival", unfit=reason
        ),
    ]
    return contest(session, case, grid.face_nbytes, entries)

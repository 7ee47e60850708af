"""Case ``halo1d``: ghosts of blocks in a cart of one axis, see `mpishare.bench.cases.halo`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpishare.bench.cases.halo import run_axes

if TYPE_CHECKING:
    from mpishare.bench.rows import Row
    from mpishare.bench.session import Session


def run(session: Session) -> list[Row]:
    """Run the case at every size and return its rows. Collective, host-blocking."""
    return run_axes(session, 1)

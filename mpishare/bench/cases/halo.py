"""The halo cases: n cells a rank along each axis, beside MPI messages.

`HaloExchange` on fields in windows and on private ones, in rows of their own. On the host the
rivals are the exchanges that MPI has, on CUDA messages that are staged through the host. A rival
moves the same cells: with corners, axis by axis with ghosts along, or to up to 26 neighbors.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mpishare.bench.arm import Arm, Entry
from mpishare.bench.cases.halo_arms import PrivateFields, WindowFields
from mpishare.bench.cases.halo_grid import Grid, cells
from mpishare.bench.cases.halo_messages import Isend, NeighborPacked, Persistent, Sendrecv, Waitany
from mpishare.bench.cases.halo_staged import Naive, Pinned
from mpishare.bench.cases.halo_types import Datatypes, NeighborTypes
from mpishare.bench.compare import compare, rivals

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.bench.rows import Row
    from mpishare.bench.session import Session

#: A rival's entries in the report: where none of several forms is the fastest everywhere, all.
_RIVALS: dict[str, dict[str, Callable[[Grid], Arm]]] = {
    "sendrecv": {"sendrecv": Sendrecv},
    "isend": {"isend": Isend},
    "persistent": {"persistent": Persistent, "persistent waitany": Waitany},
    "neighborhood": {"neighborhood packed": NeighborPacked, "neighborhood types": NeighborTypes},
    "datatypes": {"datatypes": Datatypes},
    "pinned": {"pinned": Pinned},
    "naive": {"naive": Naive},
}
_AGAINST = tuple(name for entries in _RIVALS.values() for name in entries)


def run_axes(session: Session, naxes: int) -> list[Row]:
    """Run the case of a cart with `naxes` axes at every size and return its rows.

    Collective, host-blocking.
    """
    case = f"halo{naxes}d"
    rows: list[Row] = []
    done = set()
    for nbytes in session.options.sizes(session.node.backend, case):
        # The smallest blocks are as large as the width: several sizes may come to the same one.
        found = cells(naxes, nbytes, session.options.width)
        if found in done:
            for _ in range(session.options.repeat):
                session.progress.advance()
        else:
            rows += _run_size(session, case, naxes, nbytes)
        done.add(found)
    return rows


def _run_size(session: Session, case: str, naxes: int, nbytes: int) -> list[Row]:
    # Agreed on before the cart is made, which waits for every rank.
    _, reason = session.attempt(lambda: Grid.require_memory(session, naxes, nbytes))
    grid = Grid(session, naxes, nbytes)
    if reason is None:
        _, reason = session.attempt(grid.allocate)

    def entry(name: str, kind: Callable[[Grid], Arm], *, is_rival: bool = False) -> Entry:
        against = () if is_rival else _AGAINST
        unfit = reason or (grid.crowd if kind is Waitany else None)
        return Entry(name, partial(kind, grid), grid.sent_nbytes, against, is_rival, unfit)

    def of_rival(name: str) -> list[Entry]:
        return [entry(each, kind, is_rival=True) for each, kind in _RIVALS[name].items()]

    entries = [entry("window fields", WindowFields), entry("private fields", PrivateFields)]
    entries += rivals(session, case, {name: partial(of_rival, name) for name in _RIVALS})
    rows = compare(session, case, grid.face_nbytes, entries)
    for row in rows:
        row.n, row.width, row.fields, row.corners = grid.n, grid.width, grid.count, grid.corners
    grid.close()
    return rows

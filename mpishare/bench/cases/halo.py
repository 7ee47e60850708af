"""The halo cases: n cells a rank along each axis, beside MPI messages.

`HaloExchange` on fields in windows and on private ones, in rows of their own. On the host the
rivals are the exchanges that MPI has; on CUDA messages that are staged through the host, and
libraries that move words from GPU to GPU. A rival moves the same cells: with corners, axis by axis
with ghosts along, or to up to 26 neighbors.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mpishare.bench.arm import Arm, Entry
from mpishare.bench.cases import CEILINGS, LINKS
from mpishare.bench.cases.halo_arms import PrivateFields, WindowFields
from mpishare.bench.cases.halo_block import Block
from mpishare.bench.cases.halo_grid import Grid
from mpishare.bench.cases.halo_messages import Isend, NeighborPacked, Persistent, Sendrecv, Waitany
from mpishare.bench.cases.halo_staged import Naive, Pinned
from mpishare.bench.cases.halo_types import Datatypes, NeighborTypes
from mpishare.bench.contest import contest, rivals

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.bench.rows import Kind, Row
    from mpishare.bench.session import Session

#: A rival's entries in the report: where none of several forms is the fastest everywhere, all.
_MESSAGES: dict[str, dict[str, Callable[[Grid], Arm]]] = {
    "sendrecv": {"sendrecv": Sendrecv},
    "isend": {"isend": Isend},
    "persistent": {"persistent": Persistent, "persistent waitany": Waitany},
    "neighborhood": {"neighborhood packed": NeighborPacked, "neighborhood types": NeighborTypes},
    "datatypes": {"datatypes": Datatypes},
    "staged": {"staged": Pinned},
    "naive": {"naive": Naive},
}


def run_axes(session: Session, naxes: int) -> list[Row]:
    """Run the case of a cart with `naxes` axes at every size and return its rows.

    Collective, host-blocking.
    """
    return each_size(session, f"halo{naxes}d", partial(Block.of, naxes=naxes), _run_size)


def each_size(
    session: Session,
    case: str,
    block_of: Callable[..., Block],
    run_size: Callable[[Session, str, Grid, str | None], list[Row]],
) -> list[Row]:
    """Run a case of halos on the blocks of every size and return its rows.

    Collective, host-blocking.

    Parameters
    ----------
    session : Session
        The run.
    case : str
        The case.
    block_of : callable
        ``block_of(options, nbytes=...)`` returns the block of a size.
    run_size : callable
        Returns the rows of a grid, given the session, the case, the grid and why nothing can run on
        it or None.
    """
    options = session.options
    rows: list[Row] = []
    done = set()
    for nbytes in options.sizes(session.node.backend, case):
        block = block_of(options, nbytes=nbytes)
        # The smallest blocks are as large as the width: several sizes may come to the same one.
        if block in done:
            for _ in range(options.repeat):
                session.progress.advance()
            continue
        done.add(block)
        grid, reason = grid_of(session, block)
        found = run_size(session, case, grid, reason)
        for row in found:
            row.n, row.width = block.n, block.width
            row.fields, row.corners = block.count, block.corners
        rows += found
        grid.close()
    return rows


def grid_of(session: Session, block: Block) -> tuple[Grid, str | None]:
    """Return the grid of a block, and why nothing can run on it or None. Collective."""
    # Agreed on before the cart is made, which waits for every rank.
    _, reason = session.attempt(lambda: session.require_memory(block.needed_nbytes))
    grid = Grid(session, block)
    if reason is None:
        _, reason = session.attempt(grid.allocate)
    return grid, reason


def _run_size(session: Session, case: str, grid: Grid, reason: str | None) -> list[Row]:
    def entry(name: str, arm: Callable[[Grid], Arm], kind: Kind = "rival") -> Entry:
        unfit = reason or (grid.crowd if arm is Waitany else None)
        mine = against if kind == "own" else ()
        return Entry(name, partial(arm, grid), grid.sent_nbytes, mine, kind, unfit)

    def messages(word: str) -> list[Entry]:
        return [entry(name, arm) for name, arm in _MESSAGES[word].items()]

    def linked(word: str) -> list[Entry]:
        from mpishare.bench.cases.linked import LinkedHalo, entries

        return entries(session, word, partial(LinkedHalo, grid), grid.sent_nbytes, reason)

    def ceilings() -> list[Entry]:
        from mpishare.bench.cases.ceilings import entries

        return entries(session, grid.face_nbytes * grid.count, reason)

    makers: dict[str, Callable[[], list[Entry]]] = {
        **{word: partial(messages, word) for word in _MESSAGES},
        **{word: partial(linked, word) for word in LINKS},
        CEILINGS: ceilings,
    }
    others = rivals(session, case, makers)
    against = tuple(other.name for other in others if other.kind == "rival")
    own = [
        entry("window fields", WindowFields, "own"),
        entry("private fields", PrivateFields, "own"),
    ]
    return contest(session, case, grid.face_nbytes, [*own, *others])

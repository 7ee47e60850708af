"""Cases ``halo1d`` and ``halo3d``: exchanges of ghosts against MPI and libraries between GPUs.

`HaloExchange` is timed on fields in windows and on private ones. On the host the baselines are the
exchanges that MPI has; on CUDA messages staged through the host, and libraries that move data from
GPU to GPU. A baseline moves the same cells: with corners, axis by axis with ghosts included, or to
up to 26 neighbors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mpishare
from mpishare.bench import mpi
from mpishare.bench.cases import Case
from mpishare.bench.comparison import Comparison
from mpishare.bench.grid import Block, Exchange, Grid, Problem
from mpishare.bench.library import add_libraries
from mpishare.bench.session import Bound, Session
from mpishare.bench.staged import staged

Enter = Callable[[Comparison, Grid], None]
Forms = dict[str, Callable[..., Bound]]

#: The first word is the name of the baseline. The neighborhood collective takes datatypes: with
#: packed faces it was the fastest at no size.
_MPI: Forms = {
    "sendrecv": mpi.sendrecv,
    "isend": mpi.isend,
    "persistent": mpi.persistent,
    "neighborhood types": mpi.neighborhood,
    "datatypes": mpi.datatypes,
    "staged": staged,
}


def run(session: Session, case: Case) -> None:
    def enter(comparison: Comparison, grid: Grid) -> None:
        comparison.add("window fields", partial(Exchange, grid, halo_exchange, in_windows=True))
        comparison.add("private fields", partial(Exchange, grid, halo_exchange))
        add_baselines(comparison, grid, _MPI)

    run_on_blocks(session, case, enter)


def plan(grid: Grid, *fields: Any) -> mpishare.HaloExchange:
    """Return the plan of fields like these. Collective."""
    return mpishare.HaloExchange(
        grid.cart, fields, grid.width, corners=grid.corners, axes=grid.axes, node=grid.session.node
    )


def halo_exchange(grid: Grid, *fields: Any) -> Bound:
    halo = plan(grid, *fields)
    return partial(halo.exchange, *fields), halo.close


def run_on_blocks(session: Session, case: Case, enter: Enter) -> None:
    """Run at every size of a case what `enter` adds to a comparison. Collective, host-blocking."""

    def of_size(nbytes: int) -> tuple[Block, int, int]:
        # The smallest blocks are as large as the width: several sizes may come to the same one.
        block = Block.of(session.options, case.naxes, nbytes)
        return block, block.face_nbytes, block.needed_nbytes

    for block in session.blocks(case, of_size):
        grid = Grid(session, block)
        comparison = Comparison(
            session,
            case,
            nbytes=block.face_nbytes,
            sent_nbytes=grid.sent_nbytes,
            unfit=grid.unfit,
            n=block.n,
            width=block.width,
            fields=block.count,
            corners=block.corners,
        )
        enter(comparison, grid)
        comparison.run()
        grid.close()


def add_baselines(comparison: Comparison, problem: Problem, forms: Forms) -> None:
    """Enter these forms of MPI, and the libraries."""
    for name, bind in forms.items():
        make = partial(Exchange, problem, bind)
        comparison.add_baseline(name.partition(" ")[0], make, name)
    add_libraries(comparison, problem)

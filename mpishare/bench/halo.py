"""Cases ``halo1d`` to ``halo3d``: exchanges of ghosts against MPI and libraries between GPUs.

`HaloExchange` is timed on fields in windows and on private ones. On the host the baselines are the
exchanges that MPI has; on CUDA messages staged through the host, and libraries that move data from
GPU to GPU. A baseline moves the same cells: with corners, axis by axis with ghosts included, or to
up to 26 neighbors.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import mpishare
from mpishare.bench import mpi
from mpishare.bench.cases import LIBRARIES
from mpishare.bench.comparison import Comparison
from mpishare.bench.grid import Block, Exchange, Grid, Problem
from mpishare.bench.library import add_library
from mpishare.bench.report import BASELINE
from mpishare.bench.staged import Staged

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare import Node, Window
    from mpishare.bench.cases import Case
    from mpishare.bench.comparison import Variant
    from mpishare.bench.options import Options
    from mpishare.bench.report import Row
    from mpishare.bench.session import Session

    Enter = Callable[[Comparison, Grid], None]

#: The variants of each baseline; several where none of them is the fastest at every size.
_MPI: dict[str, dict[str, Callable[..., Variant]]] = {
    "sendrecv": {"sendrecv": mpi.Sendrecv},
    "isend": {"isend": mpi.Isend},
    "persistent": {"persistent": mpi.Persistent, "persistent waitany": mpi.Waitany},
    "neighborhood": {
        "neighborhood packed": mpi.NeighborPacked,
        "neighborhood types": mpi.NeighborTypes,
    },
    "datatypes": {"datatypes": mpi.Datatypes},
    "staged": {"staged": Staged},
}


def run(session: Session, case: Case) -> list[Row]:
    """Run a case and return its rows. Collective, host-blocking."""

    def enter(comparison: Comparison, grid: Grid) -> None:
        comparison.add("window fields", partial(WindowFields, grid))
        comparison.add("private fields", partial(PrivateFields, grid))
        add_baselines(comparison, grid, _MPI)

    return run_on_blocks(session, case, enter)


def run_on_blocks(
    session: Session,
    case: Case,
    enter: Enter,
    block_of: Callable[[Options, int, int], Block] = Block.of,
) -> list[Row]:
    """Run at every size of a case what `enter` adds to a comparison. Collective, host-blocking."""
    rows: list[Row] = []
    done = set()
    for nbytes in session.options.sizes(session.node.backend, case.name):
        block = block_of(session.options, case.naxes, nbytes)
        # The smallest blocks are as large as the width: several sizes may come to the same one.
        if block in done:
            session.skip()
            continue
        done.add(block)
        if session.fits(case, block.face_nbytes, block.needed_nbytes):
            rows += _run_on_block(session, case, block, enter)
    return rows


def _run_on_block(session: Session, case: Case, block: Block, enter: Enter) -> list[Row]:
    grid, unfit = make_grid(session, block)
    comparison = Comparison(
        session, case, nbytes=grid.face_nbytes, sent_nbytes=grid.sent_nbytes, unfit=unfit
    )
    enter(comparison, grid)
    rows = comparison.run()
    for row in rows:
        row.n, row.width = block.n, block.width
        row.fields, row.corners = block.count, block.corners
    grid.close()
    return rows


def make_grid(session: Session, block: Block) -> tuple[Grid, str | None]:
    """Return the grid of a block, and why nothing can run on it or None. Collective."""
    grid = Grid(session, block)
    return grid, session.attempt(grid.allocate)[1]


def add_baselines(
    comparison: Comparison, problem: Problem, kinds: dict[str, dict[str, Callable[..., Variant]]]
) -> None:
    """Enter these forms of MPI, the libraries, and the baselines of other packages."""
    for option, of_option in kinds.items():
        if comparison.includes(option):
            for name, kind in of_option.items():
                unfit = problem.oversubscribed if kind is mpi.Waitany else None
                comparison.add(name, partial(kind, problem), kind=BASELINE, unfit=unfit)
    for option in LIBRARIES:
        add_library(comparison, option, problem)
    comparison.add_brought(problem)


class PrivateFields(Exchange[Grid]):
    """`HaloExchange` on private fields."""

    def __init__(self, grid: Grid, fields: Sequence[Any] | None = None) -> None:
        super().__init__(grid, fields)
        self._halo = mpishare.HaloExchange(
            grid.cart,
            self.fields,
            grid.width,
            corners=grid.corners,
            axes=grid.axes,
            node=grid.session.node,
        )
        self.call = self._halo.exchange

    def step(self) -> None:
        self.call(*self.fields)

    def close(self) -> None:
        self._halo.close()
        # Windows must have no views left, and the exchange may hold some.
        del self._halo, self.call, self.fields


class WindowFields(PrivateFields):
    """The same on fields in windows, which neighbors may write into."""

    def __init__(self, grid: Grid) -> None:
        node, shape = grid.session.node, grid.shape
        self._windows = [self.make_window(node, shape) for _ in range(grid.count)]
        super().__init__(grid, [self.field_in(window) for window in self._windows])

    def make_window(self, node: Node, shape: tuple[int, ...]) -> Window:
        """Return the window of one field. Collective."""
        return node.allocate_each(shape, float, fill=0)

    def field_in(self, window: Window) -> Any:
        """Return the field that a window holds."""
        return window.array

    def close(self) -> None:
        super().close()
        for window in reversed(self._windows):
            window.close()

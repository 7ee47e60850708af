"""Cases ``halo1d`` and ``halo3d``: exchanges of ghosts against MPI and libraries between GPUs.

`HaloExchange` is timed on fields in windows and on private ones. On the host the baselines are the
exchanges that MPI has; on CUDA messages staged through the host, and libraries that move data from
GPU to GPU. A baseline moves the same cells: with corners, axis by axis with ghosts included, or to
up to 26 neighbors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import mpishare
from mpishare import Node, Window
from mpishare.bench import mpi
from mpishare.bench.cases import Case
from mpishare.bench.comparison import Comparison, Variant
from mpishare.bench.grid import Block, Exchange, Grid, Problem
from mpishare.bench.library import add_libraries
from mpishare.bench.options import Options
from mpishare.bench.report import BASELINE
from mpishare.bench.session import Session
from mpishare.bench.staged import Staged

Enter = Callable[[Comparison, Grid], None]
Forms = dict[str, Callable[..., Variant]]

#: The first word is the name of the baseline; it has several variants where none of them is the
#: fastest at every size.
_MPI: Forms = {
    "sendrecv": mpi.Sendrecv,
    "isend": mpi.Isend,
    "persistent": mpi.Persistent,
    "persistent waitany": mpi.Waitany,
    "neighborhood packed": mpi.NeighborPacked,
    "neighborhood types": mpi.NeighborTypes,
    "datatypes": mpi.Datatypes,
    "staged": Staged,
}


def run(session: Session, case: Case) -> None:
    def enter(comparison: Comparison, grid: Grid) -> None:
        comparison.add("window fields", partial(WindowFields, grid))
        comparison.add("private fields", partial(PrivateFields, grid))
        add_baselines(comparison, grid, _MPI)

    run_on_blocks(session, case, enter)


def run_on_blocks(
    session: Session,
    case: Case,
    enter: Enter,
    block_of: Callable[[Options, int, int], Block] = Block.of,
) -> None:
    """Run at every size of a case what `enter` adds to a comparison. Collective, host-blocking."""

    def of_size(nbytes: int) -> tuple[Block, int, int]:
        # The smallest blocks are as large as the width: several sizes may come to the same one.
        block = block_of(session.options, case.naxes, nbytes)
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
    """Enter these forms of MPI, the libraries, and the baselines of other packages."""
    for baseline, names in groupby(forms, key=lambda name: name.partition(" ")[0]):
        for name in names if comparison.includes(baseline) else ():
            unfit = problem.oversubscribed if forms[name] is mpi.Waitany else None
            comparison.add(name, partial(forms[name], problem), kind=BASELINE, unfit=unfit)
    add_libraries(comparison, problem)
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
        return window.array

    def close(self) -> None:
        super().close()
        for window in reversed(self._windows):
            window.close()

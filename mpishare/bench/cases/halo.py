"""The exchanges: ``ring``, ``halo1d`` to ``halo3d`` against MPI, ``faces``, ``inplace``, ``calls``.

``ring`` moves both neighbors' faces through windows. The baselines move the same bytes between
private memory; on CUDA MPI is staged, with one copy of both faces to pinned memory and one of both
ghosts back.

The halo cases time `HaloExchange` on fields in windows, on private ones, and on the host on fresh
ones, in rows of their own: fresh fields are others at each call, more of them than a plan
remembers. On the host the baselines are the exchanges that MPI has, one of them of fresh fields
too; on CUDA messages staged through the host, and libraries that move data from GPU to GPU. A
baseline moves the same cells: with corners, axis by axis with ghosts included, or to up to 26
neighbors.

``faces`` compares faces across the last axis of a cube with those across its first, in the same
exchange of the same bytes in a ring of ranks. Across the first axis a face is one contiguous piece
of memory, across the last it is n * n pieces of as many cells as there are ghosts: the ratio is the
cost of packing them.

``messages1d`` and ``messages3d`` are the halo cases by MPI messages, forced inside the node, so
that one machine measures what travels between nodes: out of GPU memory where the MPI takes that,
and out of host memory.

``inplace`` compares fields shared where they are with fields of `Node.allocate_each`.

``calls`` times how long the host is busy with a call of `HaloExchange.exchange`: on CUDA, where a
call is stream-ordered, the time until it returns, with a queue that is never full. Two neighbors
and one field stand beside 26 neighbors and sixteen fields, which take no more launches.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import mpishare
from mpishare.bench.baselines.host_mpi import (
    Datatypes,
    Isend,
    NeighborPacked,
    NeighborTypes,
    Persistent,
    Sendrecv,
    SendrecvFresh,
    Waitany,
)
from mpishare.bench.baselines.library import add_library
from mpishare.bench.baselines.staged import Naive, Staged, StagedPersistent
from mpishare.bench.cases import LIBRARIES, UPPER_BOUNDS
from mpishare.bench.comparison import Comparison, Wrapper
from mpishare.bench.measure import time_batches
from mpishare.bench.problems.exchange import Exchange
from mpishare.bench.problems.grid import Block, Grid, InTurn
from mpishare.bench.problems.ring import FenceRing, PairwiseRing, Ring
from mpishare.bench.report.rows import BASELINE, UPPER_BOUND
from mpishare.bench.session import do_nothing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare import Node, Window
    from mpishare.bench.cases import Case
    from mpishare.bench.comparison import Variant
    from mpishare.bench.measure import BlockSize
    from mpishare.bench.report.rows import Clock, Row
    from mpishare.bench.session import Session

#: The variants of each baseline; several where none of them is the fastest at every size.
_RING_MPI: dict[str, dict[str, Callable[..., Variant]]] = {
    "isend": {"isend": Isend},
    "persistent": {"persistent": Persistent},
    "sendrecv": {"sendrecv": Sendrecv},
    "staged": {"staged": Staged, "staged persistent": StagedPersistent},
}
_HALO_MPI: dict[str, dict[str, Callable[..., Variant]]] = {
    "sendrecv": {"sendrecv": Sendrecv, "sendrecv fresh": SendrecvFresh},
    "isend": {"isend": Isend},
    "persistent": {"persistent": Persistent, "persistent waitany": Waitany},
    "neighborhood": {"neighborhood packed": NeighborPacked, "neighborhood types": NeighborTypes},
    "datatypes": {"datatypes": Datatypes},
    "staged": {"staged": Staged},
    "naive": {"naive": Naive},
}
_MESSAGES_MPI = {"persistent": _HALO_MPI["persistent"]}
_BLOCKS: dict[str, Callable[..., Block]] = {
    "halo1d": partial(Block.of, naxes=1),
    "halo2d": partial(Block.of, naxes=2),
    "halo3d": partial(Block.of, naxes=3),
    "faces": Block.cube,
    "inplace": partial(Block.of, naxes=1),
    "messages1d": partial(Block.of, naxes=1),
    "messages3d": partial(Block.of, naxes=3),
}
_CALLED_BLOCKS = {
    "2 neighbors, 1 field": Block(4, (64,), naxes=1),
    "26 neighbors, 16 fields": Block(8, (), naxes=3, count=16, corners=True),
}
#: Calls in a row, few enough that the stream takes them without blocking, and how often per block.
_CALLS, _BATCHES = 100, 10


def run(session: Session, case: Case) -> list[Row]:
    """Run a case and return its rows. Collective, host-blocking."""
    if case.name == "ring":
        return _run_ring(session, case)
    return _run_calls(session, case) if case.name == "calls" else _run_halo(session, case)


def _run_ring(session: Session, case: Case) -> list[Row]:
    rows: list[Row] = []
    for nbytes in session.options.sizes(session.node.backend, case.name):
        ring = Ring(session, nbytes)
        if not session.fits(case, nbytes, ring.needed_nbytes):
            continue
        _, unfit = session.attempt(ring.allocate)
        comparison = Comparison(session, case, nbytes=nbytes, sent_nbytes=2 * nbytes, unfit=unfit)
        comparison.add("window pairwise", partial(PairwiseRing, ring))
        comparison.add("window fence", partial(FenceRing, ring))
        _add_baselines(comparison, ring, _RING_MPI, nbytes)
        rows += comparison.run()
    return rows


def _run_halo(session: Session, case: Case) -> list[Row]:
    options = session.options
    rows: list[Row] = []
    done = set()
    for nbytes in options.sizes(session.node.backend, case.name):
        block = _BLOCKS[case.name](options, nbytes=nbytes)
        # The smallest blocks are as large as the width: several sizes may come to the same one.
        if block in done:
            session.skip()
            continue
        done.add(block)
        if not session.fits(case, block.face_nbytes, block.needed_nbytes):
            continue
        rows += compare_on_grid(session, case, block, partial(_enter_halo, case))
    return rows


def _enter_halo(case: Case, comparison: Comparison, grid: Grid) -> None:
    if case.name == "faces":
        comparison.add("last axis", partial(_LastAxis, grid))
        comparison.add("first axis", partial(WindowFields, grid), kind=BASELINE)
    elif case.name.startswith("messages"):
        for name, route in zip(case.variants, ("mpi", "mpi-host"), strict=True):
            comparison.add(name, partial(_Messages, grid, route))
        _add_baselines(comparison, grid, _MESSAGES_MPI, grid.face_nbytes * grid.count)
        add_library(comparison, "packed", grid)
    elif case.name == "inplace":
        comparison.add("in place", partial(_InPlace, grid))
        comparison.add("window fields", partial(WindowFields, grid), kind=BASELINE)
    else:
        comparison.add("window fields", partial(WindowFields, grid))
        comparison.add("private fields", partial(PrivateFields, grid))
        if not grid.session.on_cuda:
            comparison.add("fresh fields", partial(FreshFields, grid))
        _add_baselines(comparison, grid, _HALO_MPI, grid.face_nbytes * grid.count)


def compare_on_grid(
    session: Session,
    case: Case,
    block: Block,
    enter: Callable[[Comparison, Grid], None],
) -> list[Row]:
    """Time what `enter` adds to a comparison, on the grid of a block, and return its rows.

    Collective, host-blocking.
    """
    grid, unfit = _make_grid(session, block)
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


def _run_calls(session: Session, case: Case) -> list[Row]:
    comparison = Comparison(session, case, clocks=("throughput",))
    for name, block in _CALLED_BLOCKS.items():
        grid, unfit = _make_grid(session, block)
        make = partial(_Calls, partial(PrivateFields, grid))
        comparison.add(name, make, nbytes=block.face_nbytes, unfit=unfit)
    if comparison.includes(UPPER_BOUNDS):
        from mpishare.bench.baselines.upper_bounds import graph_launch

        launch, unfit = graph_launch(session)
        comparison.add("graph launch", partial(_Calls, launch), kind=UPPER_BOUND, unfit=unfit)
    return comparison.run()


def _make_grid(session: Session, block: Block) -> tuple[Grid, str | None]:
    """Return the grid of a block, and why nothing can run on it or None. Collective."""
    grid = Grid(session, block)
    return grid, session.attempt(grid.allocate)[1]


def _add_baselines(
    comparison: Comparison,
    problem: Grid | Ring,
    mpi: dict[str, dict[str, Callable[..., Variant]]],
    nbytes: int,
) -> None:
    """Enter MPI, the libraries and the upper bounds of moving `nbytes` to each neighbor."""
    for option, kinds in mpi.items():
        if comparison.includes(option):
            for name, kind in kinds.items():
                unfit = problem.oversubscribed if kind is Waitany else None
                comparison.add(name, partial(kind, problem), kind=BASELINE, unfit=unfit)
    for option in LIBRARIES:
        add_library(comparison, option, problem)
    if comparison.includes(UPPER_BOUNDS):
        from mpishare.bench.baselines.upper_bounds import add_upper_bounds

        add_upper_bounds(comparison, problem.session, nbytes)


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
        self._exchange = self._halo.exchange

    def step(self) -> None:
        """Exchange the ghosts."""
        self._exchange(*self.fields)

    @property
    def call(self) -> Callable[[], object]:
        """`HaloExchange.exchange` on the fields."""
        return partial(self._exchange, *self.fields)

    def close(self) -> None:
        """Close the exchange."""
        self._halo.close()
        # Windows must have no views left, and the exchange may hold some.
        del self._halo, self._exchange, self.fields


class FreshFields(InTurn, PrivateFields):
    """The same on other private fields at each call."""

    def exchange(self) -> None:
        """Exchange the ghosts of these fields."""
        self._exchange(*self.fields)


class WindowFields(PrivateFields):
    """The same on fields in windows, which neighbors may write into."""

    #: Which axis in memory each axis of a field is; empty where they are in order.
    order: tuple[int, ...] = ()

    def __init__(self, grid: Grid) -> None:
        node = grid.session.node
        axes = self.order or tuple(range(len(grid.shape)))
        shape = [0] * len(axes)
        for axis, extent in zip(axes, grid.shape, strict=True):
            shape[axis] = extent
        self._windows = [self.make_window(node, shape) for _ in range(grid.count)]
        super().__init__(grid, [window.array.transpose(axes) for window in self._windows])

    def make_window(self, node: Node, shape: list[int]) -> Window:
        """Return the window of one field. Collective."""
        return node.allocate_each(shape, float, fill=0)

    def close(self) -> None:
        """Close the exchange and the windows."""
        super().close()
        for window in reversed(self._windows):
            window.close()


class _Messages(PrivateFields):
    """`HaloExchange` as between nodes: all by messages of one kind."""

    def __init__(self, grid: Grid, route: str) -> None:
        before = os.environ.get("MPISHARE_ROUTE")
        os.environ["MPISHARE_ROUTE"] = route
        try:
            super().__init__(grid)
        finally:
            del os.environ["MPISHARE_ROUTE"]
            if before is not None:
                os.environ["MPISHARE_ROUTE"] = before


class _LastAxis(WindowFields):
    """An exchange of fields whose cut axis is the last one in memory."""

    # The views have that axis first, as all fields of the grid.
    order = (2, 0, 1)


class _InPlace(WindowFields):
    """An exchange of fields that other libraries, or windows, own."""

    def __init__(self, grid: Grid) -> None:
        self._bases: list[Window] = []
        super().__init__(grid)

    def make_window(self, node: Node, shape: list[int]) -> Window:
        if node.backend == "cuda":
            return node.share_each(node.xp.zeros(shape), copy=False)
        self._bases.append(node.allocate_each(shape, float, fill=0))
        return node.share_each(self._bases[-1].array, copy=False)

    def close(self) -> None:
        super().close()
        for base in reversed(self._bases):
            base.close()


class _Calls(Wrapper):
    """The calls of a variant, timed until they return and not until the stream is done."""

    is_calibrated = False

    def __init__(self, make: Callable[[], Variant]) -> None:
        super().__init__(make())

    def step(self) -> None:
        self.inner.step()

    def time_block(self, session: Session, clock: Clock, size: BlockSize) -> list[float]:  # noqa: ARG002
        call, samples_s = self.inner.call, []
        for _ in range(_BATCHES):
            session.line_up()
            samples_s += time_batches(call, do_nothing, 1, _CALLS)
        return samples_s

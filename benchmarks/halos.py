"""Exchanges of halos that answer narrower questions, and a naive baseline.

``faces`` compares faces across the last axis of a cube with those across its first, in the same
exchange of the same bytes in a ring of ranks. Across the first axis a face is one contiguous piece
of memory, across the last it is n * n pieces of as many cells as there are ghosts: the ratio is the
cost of packing them. ``messages1d`` and ``messages3d`` go by MPI messages, forced inside the node,
so that one machine measures what travels between nodes: out of GPU memory where the MPI takes that,
and out of host memory. ``calls`` times how long the host is busy with a call of
`HaloExchange.exchange`: on CUDA, where a call is stream-ordered, the time until it returns, with a
queue that is never full; 26 neighbors and sixteen fields take no more launches than two neighbors
and one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.catalog import UPPER_BOUNDS
from mpishare import Node, Window
from mpishare.bench.cases import Case
from mpishare.bench.comparison import Comparison, Variant, Wrapper
from mpishare.bench.grid import Block, Exchange, Grid
from mpishare.bench.halo import Forms, PrivateFields, WindowFields, add_baselines, run_on_blocks
from mpishare.bench.library import Captured
from mpishare.bench.measure import BlockSize, time_batches
from mpishare.bench.mpi import Persistent, Waitany
from mpishare.bench.report import BASELINE, UPPER_BOUND, Clock
from mpishare.bench.session import Session, do_nothing

_MESSAGES_MPI: Forms = {"persistent": Persistent, "persistent waitany": Waitany}
_CALLED_BLOCKS = {
    "2 neighbors, 1 field": Block(4, (64,), naxes=1),
    "26 neighbors, 16 fields": Block(8, (), naxes=3, count=16, corners=True),
}
#: Calls in a row, few enough that the stream takes them without blocking, and how often per block.
_CALLS, _BATCHES = 100, 10


def run(session: Session, case: Case) -> None:
    if case.name == "calls":
        _run_calls(session, case)
    elif case.name == "faces":
        run_on_blocks(session, case, _enter_faces, lambda o, _, n: Block.cube(o, n))
    else:
        run_on_blocks(session, case, _enter_messages)


def _enter_faces(comparison: Comparison, grid: Grid) -> None:
    comparison.add("last axis", partial(_LastAxis, grid))
    comparison.add("first axis", partial(WindowFields, grid), kind=BASELINE)


def _enter_messages(comparison: Comparison, grid: Grid) -> None:
    comparison.add("messages", partial(_Messages, grid, "mpi"))
    comparison.add("through the host", partial(_Messages, grid, "mpi-host"))
    add_baselines(comparison, grid, _MESSAGES_MPI)


def enter_naive(comparison: Comparison, grid: Grid) -> None:
    comparison.add("naive", partial(Naive, grid), kind=BASELINE)


def _run_calls(session: Session, case: Case) -> None:
    comparison = Comparison(session, case, clocks=("throughput",))
    for name, block in _CALLED_BLOCKS.items():
        grid = Grid(session, block)
        make = partial(_Calls, partial(PrivateFields, grid))
        comparison.add(name, make, nbytes=block.face_nbytes, unfit=grid.unfit)
    if comparison.includes(UPPER_BOUNDS):
        from benchmarks.upper_bounds import graph_launch

        launch, unfit = graph_launch(session)
        comparison.add("graph launch", partial(_Calls, launch), kind=UPPER_BOUND, unfit=unfit)
    comparison.run()


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

    def make_window(self, node: Node, shape: tuple[int, ...]) -> Window:
        return super().make_window(node, (*shape[1:], shape[0]))

    def field_in(self, window: Window) -> Any:
        # A view with that axis first, as all fields of the grid.
        return window.array.transpose(2, 0, 1)


class _Calls(Wrapper):
    """The calls of a variant, timed until they return and not until the stream is done."""

    is_calibrated = False

    def __init__(self, make: Callable[[], Variant]) -> None:
        super().__init__(make())
        # The call inside of the step, with as little around it as possible.
        inner = self.inner
        if isinstance(inner, Captured):
            self._call: Callable[[], object] = partial(inner.graph.launch, inner.stream)
        elif isinstance(inner, PrivateFields):
            self._call = partial(inner.call, *inner.fields)

    def step(self) -> None:
        self.inner.step()

    def time_block(self, session: Session, clock: Clock, size: BlockSize) -> list[float]:  # noqa: ARG002
        call, samples_s = self._call, []
        for _ in range(_BATCHES):
            session.line_up()
            samples_s += time_batches(call, do_nothing, 1, _CALLS)
        return samples_s


class Naive(Exchange[Grid]):
    """Axis by axis: asnumpy, Sendrecv and asarray for each face of each field."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self._xp = grid.session.node.xp
        self._sides = [side for pair in grid.sides_by_axis() for side in pair]

    def step(self) -> None:
        xp, sendrecv = self._xp, self.problem.comm.Sendrecv
        for side in self._sides:
            for field in self.fields:
                # Contiguous: CuPy forgets the current stream when it copies out what is not.
                out = xp.asnumpy(xp.ascontiguousarray(field[side.out]))
                into = np.empty_like(out)
                sendrecv(out, side.to, side.number, into, side.source, side.number)
                field[side.into] = xp.asarray(into)

"""Exchanges of halos that answer narrower questions.

``messages1d`` and ``messages3d`` go as between nodes, forced inside the node,
so that one machine measures it: by messages of MPI, out of GPU memory where the MPI takes that, and
out of host memory; and on GPUs by NCCL, called and in graphs. ``calls`` times how long the host is
busy with a call of `HaloExchange.exchange`: on CUDA, where a call is stream-ordered, the time until
it returns, with a queue that is never full; 26 neighbors and sixteen fields take no more launches
than two neighbors and one.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any
from unittest import mock

from mpishare.bench.cases import Case
from mpishare.bench.comparison import Comparison
from mpishare.bench.grid import Block, Exchange, Grid
from mpishare.bench.halo import Forms, add_baselines, halo_exchange, run_on_blocks
from mpishare.bench.library import IN_GRAPHS, add_with_graphs
from mpishare.bench.measure import time_batches
from mpishare.bench.mpi import persistent
from mpishare.bench.report import Clock
from mpishare.bench.session import Bound, Session, do_nothing
from mpishare.bench.staged import staged

_MESSAGES_MPI: Forms = {"persistent": persistent, "staged": staged}
_CALLED_BLOCKS = {
    "2 neighbors, 1 field": Block(4, (64,), naxes=1),
    "26 neighbors, 16 fields": Block(8, (), naxes=3, count=16, corners=True),
}
#: Calls in a row, few enough that the stream takes them without blocking, and how often per block.
_CALLS, _BATCHES = 100, 10


def _enter_messages(comparison: Comparison, grid: Grid) -> None:
    for name, route in (("messages", "mpi"), ("through the host", "mpi-host")):
        comparison.add(name, partial(Exchange, grid, partial(_by_route, route)))
    if comparison.session.on_cuda:
        by_nccl = partial(Exchange, grid, partial(_by_route, "nccl"))
        add_with_graphs(comparison, "by nccl", by_nccl, IN_GRAPHS)
    add_baselines(comparison, grid, _MESSAGES_MPI)


run_messages = partial(run_on_blocks, enter=_enter_messages)


def run_calls(session: Session, case: Case) -> None:
    comparison = Comparison(session, case, clocks=("throughput",))
    for name, block in _CALLED_BLOCKS.items():
        grid = Grid(session, block)
        make = partial(_CallsOfHalo, grid, halo_exchange)
        comparison.add(name, make, nbytes=block.face_nbytes, unfit=grid.unfit)
    comparison.run()


def _by_route(route: str, grid: Grid, *fields: Any) -> Bound:
    """Bind a `HaloExchange` as between nodes: all by one route."""
    with mock.patch.dict(os.environ, {"MPISHARE_ROUTE": route}):
        return halo_exchange(grid, *fields)


class _CallsOfHalo(Exchange[Grid]):
    """Calls of `exchange`, timed until they return, and not until the stream is done."""

    is_calibrated = False

    def time_block(self, session: Session, clock: Clock, iters: int) -> list[float]:  # noqa: ARG002
        samples_s = []
        for _ in range(_BATCHES):
            session.line_up()
            samples_s += time_batches(self.step, do_nothing, 1, _CALLS)
        return samples_s

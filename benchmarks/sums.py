"""Cases ``accumulate1d`` and ``accumulate3d``: ghosts added to their owners, beside the exchange.

The baseline is what a program would write: faces packed one by one, a Sendrecv, and sums; on CUDA
through pinned memory.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import mpishare
from mpishare.bench.check import Tally
from mpishare.bench.comparison import Comparison
from mpishare.bench.grid import Exchange, Grid
from mpishare.bench.halo import halo_exchange, run_on_blocks
from mpishare.bench.session import Bound, do_nothing


def _enter(comparison: Comparison, grid: Grid) -> None:
    comparison.add("accumulate", partial(_Sums, grid, _accumulate))
    comparison.add("sums given back", partial(_Given, grid, _give_back))
    comparison.add("in two calls", partial(_Given, grid, _in_two_calls))
    comparison.add("exchange", partial(Exchange, grid, halo_exchange))
    comparison.add("exchange of twice the cells", partial(_twice, grid))
    name = "staged" if grid.session.on_cuda else "sendrecv"
    comparison.add_baseline(name, partial(_Sums, grid, _by_hand))


class _Sums(Exchange[Grid]):
    """Adds ghosts and leaves them zero, so that another step changes nothing."""

    def __init__(self, grid: Grid, bind: Any) -> None:
        xp = grid.session.node.xp
        super().__init__(grid, bind, grid.arrays(xp.zeros))  # its own: others differ in corners
        self.check = Tally(xp)

    def fill(self, token: int) -> None:
        for field in self.fields:
            field[...] = token
            for side in self.problem.sides:
                field[side.into] = 1 + self.problem.comm.rank

    def poison(self) -> None:
        """Do nothing: `fill` writes all cells."""

    def verify(self, token: int) -> None:
        xp = self.problem.session.node.xp
        right = xp.full(self.problem.shape, float(token))
        for side in self.problem.sides:
            right[side.out] += 1 + side.to
            right[side.into] = 0
        for field in self.fields:
            self.check.compare(field, right, xp.empty(right.shape, bool))


class _Given(_Sums):
    """Gives the sums back. All ranks have the same numbers, which grow from step to step."""

    def fill(self, token: int) -> None:
        for field in self.fields:
            field[...] = 0
            field[self._owned()] = token

    def verify(self, token: int) -> None:
        xp = self.problem.session.node.xp
        for field in self.fields:
            self.check.add(xp.count_nonzero(field[self._owned()] < token))
            for side in self.problem.sides:
                self.check.add(xp.count_nonzero(field[side.into] != field[side.out]))

    def _owned(self) -> Any:
        return (slice(self.problem.width, -self.problem.width),) * self.problem.naxes


def _twice(grid: Grid) -> Exchange[Grid]:
    """Return an exchange of as many cells as sums take that are given back."""
    more = grid.arrays(grid.session.node.xp.zeros)
    return Exchange(grid, halo_exchange, [*grid.fields, *more])


def _plan(grid: Grid, fields: Any) -> mpishare.HaloExchange:
    return mpishare.HaloExchange(
        grid.cart, fields, grid.width, corners=grid.corners, axes=grid.axes, node=grid.session.node
    )


def _accumulate(grid: Grid, *fields: Any) -> Bound:
    halo = _plan(grid, fields)
    return partial(halo.accumulate, *fields), halo.close


def _give_back(grid: Grid, *fields: Any) -> Bound:
    halo = _plan(grid, fields)
    return partial(halo.accumulate, *fields, give_back=True), halo.close


def _in_two_calls(grid: Grid, *fields: Any) -> Bound:
    halo = _plan(grid, fields)

    def add_and_exchange() -> None:
        halo.accumulate(*fields)
        halo.exchange(*fields)

    return add_and_exchange, halo.close


def _by_hand(grid: Grid, *fields: Any) -> Bound:
    xp, sendrecv = grid.session.node.xp, grid.comm.Sendrecv
    if grid.session.on_cuda:
        from cupyx import zeros_pinned as zeros
    else:
        from numpy import zeros
    faces = [(side, field[side.into], field[side.out]) for side in grid.sides for field in fields]
    buffers = [(zeros(ghosts.shape), zeros(ghosts.shape)) for _, ghosts, _ in faces]

    def add() -> None:
        for (side, ghosts, cells), (out, into) in zip(faces, buffers, strict=True):
            if xp is np:
                out[...] = ghosts
            else:
                xp.ascontiguousarray(ghosts).get(out=out)  # which waits for the stream
            ghosts[...] = 0
            sendrecv(out, side.source, side.number, into, side.to, side.number)
            cells += xp.asarray(into)

    return add, do_nothing


run = partial(run_on_blocks, enter=_enter)

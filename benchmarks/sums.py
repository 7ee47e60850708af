"""Cases ``accumulate1d`` and ``accumulate3d``: ghosts added to their owners, beside exchanges."""

from __future__ import annotations

from functools import partial
from typing import Any

from mpishare.bench.check import Tally
from mpishare.bench.comparison import Comparison
from mpishare.bench.grid import Exchange, Grid
from mpishare.bench.halo import halo_exchange, plan, run_on_blocks
from mpishare.bench.session import Bound, in_turn


def _enter(comparison: Comparison, grid: Grid) -> None:
    comparison.add("accumulate", partial(_Sums, grid, _accumulate))
    comparison.add("sums given back", partial(_Given, grid, partial(_accumulate, give_back=True)))
    comparison.add("in two calls", partial(_Given, grid, _in_two_calls))
    comparison.add("exchange", partial(Exchange, grid, halo_exchange))
    comparison.add("exchange of twice the cells", partial(_twice, grid))


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


def _accumulate(grid: Grid, *fields: Any, give_back: bool = False) -> Bound:
    halo = plan(grid, *fields)
    return partial(halo.accumulate, *fields, give_back=give_back), halo.close


def _in_two_calls(grid: Grid, *fields: Any) -> Bound:
    halo = plan(grid, *fields)
    calls = partial(halo.accumulate, *fields), partial(halo.exchange, *fields)
    return in_turn(*calls), halo.close


run = partial(run_on_blocks, enter=_enter)

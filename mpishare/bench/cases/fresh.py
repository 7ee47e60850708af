"""``fresh``: exchanges of arrays that are new at each call, as programs make that keep none.

*new arrays* copies its array into a new one and exchanges that, as does the baseline *sendrecv*,
which is three lines of MPI (on CUDA *staged*, through pinned memory). *kept, copied* copies to and
fro between two arrays: the same work without new addresses. *arrays in turn* makes its arrays
before, more of them than a plan remembers, as do the *fresh fields* of the halo cases, and stands
beside *kept array*, the same call on one array; neither copies, so neither has a baseline here.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mpishare.bench.cases.halo import FreshFields, PrivateFields, compare_on_grid
from mpishare.bench.problems.exchange import Exchange
from mpishare.bench.problems.grid import Block, Grid

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from mpishare.bench.cases import Case
    from mpishare.bench.comparison import Comparison
    from mpishare.bench.report.rows import Row
    from mpishare.bench.session import Session


def run(session: Session, case: Case) -> list[Row]:
    """Run the case and return its rows. Collective, host-blocking."""
    rows: list[Row] = []
    for nbytes in session.options.sizes(session.node.backend, case.name):
        block = Block.of(session.options, naxes=1, nbytes=nbytes)
        if not session.fits(case, block.face_nbytes, block.needed_nbytes):
            continue
        rows += compare_on_grid(session, case, block, _enter)
    return rows


def _enter(comparison: Comparison, grid: Grid) -> None:
    comparison.add("new arrays", partial(_NewArrays, grid))
    comparison.add("kept, copied", partial(_KeptCopied, grid))
    comparison.add("arrays in turn", partial(FreshFields, grid), against=())
    comparison.add("kept array", partial(PrivateFields, grid), against=())
    name, kind = ("staged", _StagedNew) if grid.session.on_cuda else ("sendrecv", _SendrecvNew)
    comparison.add_baselines(name, {name: partial(kind, grid)})


class _NewArrays(PrivateFields):
    """Copy the fields into new arrays, and exchange these."""

    def step(self) -> None:
        self.fields = tuple(field.copy() for field in self.fields)
        self._exchange(*self.fields)


class _KeptCopied(PrivateFields):
    """Copy the fields into others that are kept, and exchange these."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self._copyto = grid.session.node.xp.copyto
        self._others = tuple(field.copy() for field in self.fields)

    def step(self) -> None:
        self.fields, self._others = self._others, self.fields
        for field, other in zip(self.fields, self._others, strict=True):
            self._copyto(field, other)
        self._exchange(*self.fields)

    def close(self) -> None:
        del self._others
        super().close()


class _SendrecvNew(Exchange[Grid]):
    """Copy the fields into new arrays, and exchange these by Sendrecv."""

    def step(self) -> None:
        self.fields = tuple(field.copy() for field in self.fields)
        sendrecv = self.problem.comm.Sendrecv
        for side in self.problem.sides:
            for field in self.fields:
                out, into = field[side.out], field[side.into]
                sendrecv(out, side.to, side.number, into, side.source, side.number)


class _StagedNew(Exchange[Grid]):
    """The same through pinned memory."""

    def __init__(self, grid: Grid) -> None:
        import cupyx

        super().__init__(grid)
        self._synchronize = grid.session.synchronize

        def pinned() -> list[list[Any]]:
            faces: Sequence[Any] = [self.fields[0][side.out] for side in grid.sides]
            return [
                [cupyx.zeros_pinned(face.shape, face.dtype) for _ in self.fields] for face in faces
            ]

        self._pinned = list(zip(grid.sides, pinned(), pinned(), strict=True))

    def step(self) -> None:
        self.fields = tuple(field.copy() for field in self.fields)
        sendrecv = self.problem.comm.Sendrecv
        for side, sent, _ in self._pinned:
            for field, out in zip(self.fields, sent, strict=True):
                field[side.out].get(out=out, blocking=False)
        # Also for the copies of the step before, out of what is received into now.
        self._synchronize()
        for side, sent, received in self._pinned:
            for field, out, into in zip(self.fields, sent, received, strict=True):
                sendrecv(out, side.to, side.number, into, side.source, side.number)
                field[side.into].set(into)

    def close(self) -> None:
        self._synchronize()
        del self._pinned

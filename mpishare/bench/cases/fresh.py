"""``fresh``: exchanges of arrays that are new at each call, as programs make that keep none.

*new arrays* copies its array into a new one and exchanges that, as does *sendrecv*, which is three
lines of MPI (on CUDA *staged*, through pinned memory). *kept, copied* copies to and fro between two
arrays: the same work without new addresses. *arrays in turn* makes its arrays before, more of them
than a plan remembers, and stands beside *kept array*, the same call on one array.
"""

from __future__ import annotations

from functools import partial
from itertools import cycle
from math import prod
from typing import TYPE_CHECKING

from mpishare.bench.cases.halo import PrivateFields, compare_on_grid
from mpishare.bench.problems.exchange import Exchange
from mpishare.bench.problems.grid import ITEM_NBYTES, Block, Grid

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from mpishare.bench.cases import Case
    from mpishare.bench.comparison import Comparison
    from mpishare.bench.report.rows import Row
    from mpishare.bench.session import Session

_IN_TURN = 80


def run(session: Session, case: Case) -> list[Row]:
    """Run the case and return its rows. Collective, host-blocking."""
    rows: list[Row] = []
    for nbytes in session.options.sizes(session.node.backend, case.name):
        block = Block.of(session.options, naxes=1, nbytes=nbytes)
        in_turn_nbytes = ITEM_NBYTES * prod(block.shape) * block.count * _IN_TURN
        if not session.fits(case, block.face_nbytes, block.needed_nbytes + in_turn_nbytes):
            continue
        rows += compare_on_grid(session, case, block, _enter)
    return rows


def _enter(comparison: Comparison, grid: Grid) -> None:
    on_cuda = grid.session.on_cuda
    by_messages = "staged" if on_cuda else "sendrecv"
    copying = ("kept, copied", by_messages)
    comparison.add("new arrays", partial(_NewArrays, grid), against=copying)
    comparison.add("arrays in turn", partial(_InTurn, grid), against=("kept array",))
    kept = {"kept, copied": _KeptCopied, "kept array": PrivateFields}
    comparison.add_baselines("kept", {name: partial(kind, grid) for name, kind in kept.items()})
    kind = _StagedNew if on_cuda else _SendrecvNew
    comparison.add_baselines(by_messages, {by_messages: partial(kind, grid)})


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


class _InTurn(PrivateFields):
    """Exchange other arrays at each call."""

    def __init__(self, grid: Grid) -> None:
        xp = grid.session.node.xp
        self._sets = [
            tuple(xp.zeros(grid.shape) for _ in range(grid.count)) for _ in range(_IN_TURN)
        ]
        super().__init__(grid, self._sets[0])
        self._next = cycle(self._sets)

    def step(self) -> None:
        self.fields = next(self._next)
        self._exchange(*self.fields)

    def fill(self, token: int) -> None:
        for fields in self._sets:
            self.problem.check.fill(fields, token)

    def poison(self) -> None:
        for fields in self._sets:
            self.problem.check.poison(fields)

    def close(self) -> None:
        del self._sets, self._next
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

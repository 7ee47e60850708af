"""Case ``fresh``, and fresh fields in the halo cases: arrays that are others at each call.

The case exchanges arrays that are new at each call, as programs make that keep none:
*new arrays* copies its array into a new one and exchanges that, as does the baseline *sendrecv*,
which is three lines of MPI (on CUDA *staged*, through pinned memory). *kept, copied* copies to and
fro between two arrays: the same work without new addresses. *arrays in turn* makes its arrays
before, more of them than a plan remembers, as do the *fresh fields* of the halo cases, and stands
beside *kept array*, the same call on one array; neither copies, so neither has a baseline here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, cycle
from math import prod
from typing import Any

import numpy as np

from mpishare.bench.cases import Case
from mpishare.bench.comparison import Comparison
from mpishare.bench.grid import ITEM_NBYTES, Exchange, Grid, Side
from mpishare.bench.halo import PrivateFields, run_on_blocks
from mpishare.bench.report import BASELINE
from mpishare.bench.session import Session

#: Fields in turn: more than a plan remembers, each as far from the one before as allocators may
#: place arrays.
_IN_TURN, _APART_NBYTES = 80, 512


def run(session: Session, case: Case) -> None:
    run_on_blocks(session, case, _enter)


def enter_fresh(comparison: Comparison, grid: Grid) -> None:
    """Enter fresh fields of mpishare and of Sendrecv in a halo case on the host."""
    comparison.add("fresh fields", partial(FreshFields, grid))
    comparison.add("sendrecv fresh", partial(SendrecvFresh, grid), kind=BASELINE)


def _enter(comparison: Comparison, grid: Grid) -> None:
    comparison.add("new arrays", partial(_NewArrays, grid))
    comparison.add("kept, copied", partial(_KeptCopied, grid))
    comparison.add("arrays in turn", partial(FreshFields, grid), against=())
    comparison.add("kept array", partial(PrivateFields, grid), against=())
    name, kind = ("staged", _StagedNew) if grid.session.on_cuda else ("sendrecv", _SendrecvNew)
    comparison.add_baselines(name, {name: partial(kind, grid)})


class InTurn(Exchange[Grid]):
    """A variant that exchanges other fields at each step, which lie over each other if large."""

    # What fills one is wrong in the next.
    moves = False

    def __init__(self, grid: Grid) -> None:
        cells, apart = prod(grid.shape), _APART_NBYTES // ITEM_NBYTES
        rows = grid.session.node.xp.zeros((grid.count, cells + _IN_TURN * apart))
        fields = [
            tuple(row[start : start + cells].reshape(grid.shape) for row in rows)
            for start in range(0, _IN_TURN * apart, apart)
        ]
        super().__init__(grid, fields[0])
        self._turns = cycle(fields)

    def exchange(self) -> None:
        """Exchange the ghosts of these fields."""
        raise NotImplementedError

    def step(self) -> None:
        self.fields = next(self._turns)
        self.exchange()

    def checked_step(self, token: int) -> None:
        self.fields = next(self._turns)
        self.poison()
        self.check_around(self.exchange, token)

    def close(self) -> None:
        del self._turns
        super().close()


class FreshFields(InTurn, PrivateFields):
    """The same on other private fields at each call."""

    def exchange(self) -> None:
        self.call(*self.fields)


class SendrecvFresh(InTurn):
    """The same by messages of MPI."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self._send = _sendrecv(grid)

    def exchange(self) -> None:
        self._send(self.fields)


def _sendrecv(grid: Grid) -> Callable[[Sequence[Any]], None]:
    """Return the call that exchanges any fields: axis by axis, two Sendrecv each.

    A face that is not contiguous goes through buffers.
    """
    sendrecv, copyto = grid.comm.Sendrecv, np.copyto
    faces: list[tuple[Side, tuple[Any, Any] | None]] = []
    for side in chain.from_iterable(grid.sides_by_axis()):
        out, into = grid.fields[0][side.out], grid.fields[0][side.into]
        is_contiguous = out.flags.c_contiguous and into.flags.c_contiguous
        faces.append((side, None if is_contiguous else (np.empty(out.shape), np.empty(into.shape))))

    def exchange(fields: Sequence[Any]) -> None:
        for side, buffers in faces:
            to, source, tag = side.to, side.source, side.number
            for field in fields:
                if buffers is None:
                    sendrecv(field[side.out], to, tag, field[side.into], source, tag)
                    continue
                out, into = buffers
                copyto(out, field[side.out])
                sendrecv(out, to, tag, into, source, tag)
                copyto(field[side.into], into)

    return exchange


class _NewArrays(PrivateFields):
    """Copy the fields into new arrays, and exchange these."""

    def step(self) -> None:
        self.fields = tuple(field.copy() for field in self.fields)
        self.call(*self.fields)


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
        self.call(*self.fields)

    def close(self) -> None:
        del self._others
        super().close()


class _SendrecvNew(Exchange[Grid]):
    """Copy the fields into new arrays, and exchange these by Sendrecv."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self._send = _sendrecv(grid)

    def step(self) -> None:
        self.fields = tuple(field.copy() for field in self.fields)
        self._send(self.fields)


class _StagedNew(Exchange[Grid]):
    """The same through pinned memory."""

    def __init__(self, grid: Grid) -> None:
        import cupyx

        super().__init__(grid)
        self._synchronize = grid.session.synchronize

        def pinned(side: Side) -> list[Any]:
            faces = [field[side.out] for field in self.fields]
            return [cupyx.zeros_pinned(face.shape, face.dtype) for face in faces]

        self._pinned = [(side, pinned(side), pinned(side)) for side in grid.sides]

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

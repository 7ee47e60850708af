"""Case ``fresh``: arrays that are others at each call.

The note of the case in `catalog` says what its variants do. Its baseline is three lines of MPI, on
CUDA through pinned memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from math import prod
from typing import Any

from mpishare.bench.comparison import Comparison
from mpishare.bench.grid import ITEM_NBYTES, Exchange, Grid, Side
from mpishare.bench.halo import halo_exchange, plan, run_on_blocks
from mpishare.bench.session import Bound, Call, do_nothing

#: Fields in turn: more than a plan remembers, each as far from the one before as allocators may
#: place arrays.
_IN_TURN, _APART_NBYTES = 80, 512

Fields = tuple[Any, ...]


def _enter(comparison: Comparison, grid: Grid) -> None:
    comparison.add("new arrays", partial(_Others, grid, any_fields, _copied))
    comparison.add("kept, copied", partial(_Others, grid, any_fields, _to_and_fro(grid)))
    comparison.add("arrays in turn", partial(_InTurn, grid, any_fields), against=())
    comparison.add("kept array", partial(Exchange, grid, halo_exchange), against=())
    name, bind = ("staged", _staged) if grid.session.on_cuda else ("sendrecv", _by_sendrecv)
    comparison.add_baseline(name, partial(_Others, grid, bind, _copied))


def any_fields(grid: Grid, *fields: Any) -> tuple[Callable[..., object], Call]:
    halo = plan(grid, *fields)
    return halo.exchange, halo.close


def _copied(fields: Fields) -> Fields:
    return tuple(field.copy() for field in fields)


def _to_and_fro(grid: Grid) -> Callable[[Fields], Fields]:
    """Return the call that copies fields into the others of two sets that are kept."""
    copyto = grid.session.node.xp.copyto
    others: Fields = ()

    def copied(fields: Fields) -> Fields:
        nonlocal others
        targets, others = others or _copied(fields), fields
        for target, field in zip(targets, fields, strict=True):
            copyto(target, field)
        return targets

    return copied


class _Others(Exchange[Grid]):
    """Exchanges other fields at each step, made by `other` from the last ones.

    `bind` returns a call that takes any fields like those of the grid.
    """

    def __init__(
        self,
        grid: Grid,
        bind: Callable[..., tuple[Callable[..., object], Call]],
        other: Callable[[Fields], Fields],
        fields: Sequence[Any] | None = None,
    ) -> None:
        self._other = other
        super().__init__(grid, bind, fields)
        self.exchange: Callable[..., object] = self.step
        self.step = self.exchange_others

    def exchange_others(self) -> None:
        self.fields = self._other(self.fields)
        self.exchange(*self.fields)

    def close(self) -> None:
        del self.exchange, self._other
        super().close()


class _InTurn(_Others):
    """Exchanges fields that were made before, which lie over each other if large."""

    # What fills one is wrong in the next.
    moves = False

    def __init__(self, grid: Grid, bind: Callable[..., Bound]) -> None:
        cells, apart = prod(grid.shape), _APART_NBYTES // ITEM_NBYTES
        rows = grid.session.node.xp.zeros((grid.count, cells + _IN_TURN * apart))
        every = [
            tuple(row[start : start + cells].reshape(grid.shape) for row in rows)
            for start in range(0, _IN_TURN * apart, apart)
        ]
        turns = cycle(every)
        super().__init__(grid, bind, lambda _: next(turns), every[0])

    def checked_step(self, token: int) -> None:
        self.fields = self._other(self.fields)
        self.poison()
        super().checked_step(token)

    def move(self) -> None:
        self.exchange(*self.fields)


def _by_sendrecv(grid: Grid, *_: Any) -> tuple[Callable[..., object], Call]:
    """Bind two Sendrecv for each of any fields: faces across the first axis are contiguous."""
    sendrecv = grid.comm.Sendrecv

    def exchange(*fields: Any) -> None:
        for side in grid.sides:
            to, source, tag = side.to, side.source, side.number
            for field in fields:
                sendrecv(field[side.out], to, tag, field[side.into], source, tag)

    return exchange, do_nothing


def _staged(grid: Grid, *fields: Any) -> tuple[Callable[..., object], Call]:
    """Bind the same through pinned memory."""
    import cupyx

    synchronize, sendrecv = grid.session.synchronize, grid.comm.Sendrecv

    def pinned(side: Side) -> list[Any]:
        faces = [field[side.out] for field in fields]
        return [cupyx.zeros_pinned(face.shape, face.dtype) for face in faces]

    held = [(side, pinned(side), pinned(side)) for side in grid.sides]

    def exchange(*fields: Any) -> None:
        for side, sent, _ in held:
            for field, out in zip(fields, sent, strict=True):
                field[side.out].get(out=out, blocking=False)
        # Also for the copies of the step before, out of what is received into now.
        synchronize()
        for side, sent, received in held:
            for field, out, into in zip(fields, sent, received, strict=True):
                sendrecv(out, side.to, side.number, into, side.source, side.number)
                field[side.into].set(into)

    return exchange, do_nothing


run = partial(run_on_blocks, enter=_enter)

"""Case ``rows``: rows of eight columns to both neighbors of a ring, out of five times as many.

The rows are named by their numbers, half of them to either side. `RowExchange` copies them to the
peers' slots and out of these into arrays; `migrate` finds them by their goals and closes the gaps.
Both go by NCCL too, as between nodes; all of these called and in graphs.
The baselines pack each side into one buffer, tell its length and send it: by Sendrecv, by
Alltoallv, or, on CUDA, selected by CuPy, counted on the host and staged through pinned memory or
sent by NCCL.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

import mpishare
from benchmarks.catalog import UPPER_BOUNDS
from mpishare.bench.cases import Case
from mpishare.bench.check import Tally
from mpishare.bench.comparison import Comparison, Make, Variant
from mpishare.bench.library import Transfer, captured, open_library
from mpishare.bench.report import BASELINE, UPPER_BOUND
from mpishare.bench.session import Session

_COLUMNS, _FACTOR = 8, 10
LOW, HIGH = (0, -1), (0, 1)
SIDES = (LOW, HIGH)


def run(session: Session, case: Case) -> None:
    nbytes_of_row = 8 * _COLUMNS

    def of_size(nbytes: int) -> tuple[int, int, int]:
        return nbytes // nbytes_of_row, nbytes, 8 * _FACTOR * nbytes

    for nrows in session.blocks(case, of_size):
        nbytes = nbytes_of_row * nrows
        comparison = Comparison(session, case, nbytes=nbytes, sent_nbytes=2 * nbytes)
        by_hand = ("migrate by hand",) if comparison.includes("sendrecv") else None
        for name, kind in (("rows", _Exchange), ("migrate", _Migrate)):
            against = by_hand if kind is _Migrate else None
            for route in ("", "nccl") if session.on_cuda else ("",):
                label = f" by {route}" if route else ""
                make: Make = partial(kind, session, nrows, route)
                comparison.add(f"{name}{label}", make, against=against)
                if session.on_cuda:
                    comparison.add(f"{name}{label} graph", captured(session, make))
        if session.on_cuda and comparison.includes(UPPER_BOUNDS):
            copies = captured(session, partial(_Copies, session, nrows))
            comparison.add("copies graph", copies, kind=UPPER_BOUND)
        for name, baseline in _BASELINES.items():
            comparison.add_baseline(name, partial(baseline, session, nrows))
        if by_hand:
            by_goals = partial(_ByGoals, session, nrows)
            comparison.add(*by_hand, by_goals, kind=BASELINE, against=())
        if comparison.includes("nccl"):
            from mpishare.bench.nccl import Nccl

            library, unfit = open_library(session, Nccl)
            make = partial(_ByNccl, session, nrows, library)
            comparison.add_baseline("nccl", make, unfit=unfit)
        comparison.run()


class _Rows(Variant):
    """Columns; every fifth row goes to a neighbor, in turn the left and the right one."""

    def __init__(self, session: Session, nrows: int) -> None:
        self.session, self.comm, self.nrows = session, session.comm, nrows
        self.xp = xp = session.node.xp
        self.check = Tally(xp)
        count, size, rank = _FACTOR * nrows, self.comm.size, self.comm.rank
        self.low, self.high = (rank - 1) % size, (rank + 1) % size
        self.columns = [xp.zeros(2 * count) for _ in range(_COLUMNS)]
        # Every fifth row leaves, to one side and to the other in turn.
        leaving = xp.arange(0, count, _FACTOR // 2)
        self.numbers = {LOW: leaving[::2].copy(), HIGH: leaving[1::2].copy()}
        self.arrived = {side: [xp.zeros(nrows) for _ in self.columns] for side in SIDES}
        self.step = self.exchange

    def exchange(self) -> None:
        raise NotImplementedError

    def fill(self, token: int) -> None:
        for number, column in enumerate(self.columns):
            column.fill(100.0 * token + number + 0.001 * self.comm.rank)

    def poison(self) -> None:
        for column in (each for side in self.arrived.values() for each in side):
            column.fill(-1)

    def verify(self, token: int) -> None:
        for side, rank in ((LOW, self.low), (HIGH, self.high)):
            for number, column in enumerate(self.arrived[side]):
                self.check.add((column != 100.0 * token + number + 0.001 * rank).sum())


class _Exchange(_Rows):
    def __init__(self, session: Session, nrows: int, route: str = "") -> None:
        super().__init__(session, nrows)
        with mock.patch.dict(os.environ, {"MPISHARE_ROUTE": route} if route else {}):
            self.swap = mpishare.RowExchange(
                session.comm,
                ["f8"] * _COLUMNS,
                # Two ranks are each other's neighbor on both sides: `migrate` fills one by one.
                max(nrows * (2 if session.comm.size == 2 else 1), 1),
                dims=[session.comm.size],
                periods=True,
                node=session.node,
            )

    def exchange(self) -> None:
        self.swap.start(self.columns, self.numbers)
        self.swap.wait(self.arrived)

    def close(self) -> None:
        self.swap.close()


class _Copies(_Rows):
    """A copy on the GPU of as many rows, packed, and a look at the goals of all: no less moves."""

    def __init__(self, session: Session, nrows: int) -> None:
        super().__init__(session, nrows)
        self.goals = self.xp.zeros(_FACTOR * nrows, "i4")
        self.leaves = self.goals != self.comm.rank
        self.packed, self.into = (self.xp.zeros((2, _COLUMNS, nrows)) for _ in range(2))
        self.arrived = {side: [*rows] for side, rows in zip(SIDES, self.into, strict=True)}

    def fill(self, token: int) -> None:
        for rows, rank in zip(self.packed, (self.low, self.high), strict=True):
            for number, row in enumerate(rows):
                row.fill(100.0 * token + number + 0.001 * rank)

    def exchange(self) -> None:
        self.into[...] = self.packed
        self.xp.not_equal(self.goals, self.comm.rank, out=self.leaves)


class _Moved(_Rows):
    """Some rows leave, and as many new ones are put behind the rest."""

    moves = False  # rows that came go back in the next step
    count: Any

    def verify(self, token: int) -> None:
        """Count what came, behind the rows that stay, and rows too few."""
        n, size = _FACTOR * self.nrows, self.comm.size
        came = 0 if size == 1 else 2 * self.nrows
        self.check.add(abs(self.count - n))
        for number, column in enumerate(self.columns):
            found = self.xp.sort(column[n - came : n])
            value = 100.0 * token + number
            right = np.sort(
                np.repeat([value + 0.001 * self.low, value + 0.001 * self.high], came // 2)
            )
            self.check.add((found != self.xp.asarray(right)).sum())


class _Migrate(_Moved, _Exchange):
    """By the goals of all rows."""

    def __init__(self, session: Session, nrows: int, route: str = "") -> None:
        super().__init__(session, nrows, route)
        xp, count = self.xp, _FACTOR * nrows
        self.migration = mpishare.Migration(self.swap)
        self.goals = xp.full(count, self.comm.rank, "i4")
        self.goals[self.numbers[LOW]], self.goals[self.numbers[HIGH]] = self.low, self.high
        self.to, self.count = xp.zeros(2 * count, "i4"), xp.zeros((), "i8")
        self.exchange()  # which allocates memory, as no graph can

    def exchange(self) -> None:
        self.to[: len(self.goals)] = self.goals
        self.count.fill(len(self.goals))
        self.migration.migrate(self.columns, self.to, self.count)


class _Sendrecv(_Rows):
    """Lengths, then rows packed on the host, to one side after the other."""

    def exchange(self) -> None:
        for side, to, source in ((LOW, self.low, self.high), (HIGH, self.high, self.low)):
            sent = self.packed(side)
            came = np.empty(1, "i8")
            self.comm.Sendrecv(np.array([sent.shape[1]]), to, 0, came, source, 0)
            received = np.empty((_COLUMNS, int(came[0])))
            self.comm.Sendrecv(sent, to, 1, received, source, 1)
            self.unpack(HIGH if side is LOW else LOW, received)

    def packed(self, side: Any) -> Any:
        numbers = self.numbers[side]
        sent = np.empty((_COLUMNS, len(numbers)))
        for row, column in zip(sent, self.columns, strict=True):
            np.take(column, numbers, out=row, mode="clip")
        return sent

    def unpack(self, side: Any, received: Any) -> None:
        for array, row in zip(self.arrived[side], received, strict=True):
            array[:] = row


class _ByGoals(_Moved, _Sendrecv):
    """By the sides of all rows: found, packed, the gaps closed by the last ones, and sent."""

    def __init__(self, session: Session, nrows: int) -> None:
        super().__init__(session, nrows)
        self.sides, self.to = np.zeros(_FACTOR * nrows, "i4"), np.zeros(_FACTOR * nrows, "i4")
        self.sides[self.numbers[LOW]], self.sides[self.numbers[HIGH]] = 1, 2
        self.sent: dict[Any, Any] = {}

    def exchange(self) -> None:
        self.to[:] = self.sides
        self.numbers = {side: np.flatnonzero(self.to == at) for at, side in ((1, LOW), (2, HIGH))}
        self.sent = {side: super(_ByGoals, self).packed(side) for side in SIDES}
        gone = np.flatnonzero(self.to)
        self.count = count = len(self.to) - len(gone)
        last = count + np.flatnonzero(self.to[count:] == 0)
        gaps = gone[: len(last)]
        for column in (*self.columns, self.to):
            column[gaps] = column[last]
        super().exchange()

    def packed(self, side: Any) -> Any:
        return self.sent[side]

    def unpack(self, side: Any, received: Any) -> None:  # noqa: ARG002
        end = self.count + received.shape[1]
        for column, row in zip(self.columns, received, strict=True):
            column[self.count : end] = row
        self.count = end


class _Alltoallv(_Sendrecv):
    """The same by two collectives; of two sides that are one rank, one after the other."""

    def exchange(self) -> None:
        comm, size = self.comm, self.comm.size
        counts, received = np.zeros(size, "i8"), np.empty(size, "i8")
        parts: list[list[Any]] = [[] for _ in range(size)]
        for side, rank in ((LOW, self.low), (HIGH, self.high)):
            parts[rank].append(self.packed(side))
            counts[rank] += parts[rank][-1].size
        comm.Alltoall(counts, received)
        sent = np.concatenate([part.ravel() for each in parts for part in each])
        found = np.empty(int(received.sum()))
        comm.Alltoallv([sent, counts], [found, received])
        begins = np.concatenate([[0], np.cumsum(received)])
        # Its low side is my high one: the first of two parts of one rank.
        for side, rank, at in ((HIGH, self.high, 0), (LOW, self.low, int(self.low == self.high))):
            begin = int(begins[rank]) + at * int(received[rank]) // 2
            self.unpack(side, found[begin : begin + self.nrows * _COLUMNS].reshape(_COLUMNS, -1))


class _Staged(_Sendrecv):
    """Goals compared on the GPU, counts read by the host, rows through pinned memory."""

    def __init__(self, session: Session, nrows: int) -> None:
        super().__init__(session, nrows)
        import cupyx

        self.pinned = [cupyx.empty_pinned((_COLUMNS, max(nrows, 1))) for _ in range(2)]
        self.mask = self.xp.zeros(len(self.columns[0]), "i4")
        self.mask[self.numbers[LOW]], self.mask[self.numbers[HIGH]] = 1, 2

    def stacked(self, side: Any) -> Any:
        numbers = self.xp.flatnonzero(self.mask == (1 if side is LOW else 2))  # waits for the host
        return self.xp.stack([column[numbers] for column in self.columns])

    def packed(self, side: Any) -> Any:
        found = self.stacked(side)
        return found.get(out=self.pinned[0][:, : found.shape[1]])

    def unpack(self, side: Any, received: Any) -> None:
        into = self.pinned[1][:, : received.shape[1]]
        into[...] = received
        super().unpack(side, self.xp.asarray(into))


class _ByNccl(_Staged):
    """The same counts, and rows in a group of sends and receives."""

    def __init__(self, session: Session, nrows: int, library: Any) -> None:
        super().__init__(session, nrows)
        self.library = library

    packed, unpack = _Staged.stacked, _Sendrecv.unpack

    def exchange(self) -> None:
        moves = []
        for side, to, source in ((LOW, self.low, self.high), (HIGH, self.high, self.low)):
            sent, came = self.packed(side), np.empty(1, "i8")
            self.comm.Sendrecv(np.array([sent.shape[1]]), to, 0, came, source, 0)
            into = self.xp.empty((_COLUMNS, int(came[0])))
            moves.append(Transfer(to, source, sent, into))
        self.library.bind(moves, early=False)()
        for side, move in zip((HIGH, LOW), moves, strict=True):
            self.unpack(side, move.into)


_BASELINES: dict[str, Callable[[Session, int], Variant]] = {
    "sendrecv": _Sendrecv,
    "alltoallv": _Alltoallv,
    "staged": _Staged,
}

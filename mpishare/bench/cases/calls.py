"""Case ``calls``: how long the host is busy with a call of `HaloExchange.exchange`.

On CUDA a call is stream-ordered: this is the time until it returns, with a queue that is never
full, and not that of the exchange. Two neighbors and one field stand beside 26 neighbors and
sixteen fields, which take no more launches. On the host backend calls block.
"""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from mpishare.bench.arm import Arm, Entry
from mpishare.bench.cases import CEILINGS
from mpishare.bench.cases.halo import grid_of
from mpishare.bench.cases.halo_arms import PrivateFields
from mpishare.bench.cases.halo_block import Block
from mpishare.bench.contest import in_turns, rivals
from mpishare.bench.measure import max_over_ranks
from mpishare.bench.rows import Row

if TYPE_CHECKING:
    from mpishare.bench.session import Session

_BLOCKS = {
    "2 neighbors, 1 field": Block(4, (64,), naxes=1),
    "26 neighbors, 16 fields": Block(8, (), naxes=3, count=16, corners=True),
}
#: Calls in a row, fewer than a stream takes without being waited for, and how often.
_CALLS, _TURNS = 100, 10


def run(session: Session) -> list[Row]:
    """Run the case and return its rows. Collective, host-blocking."""
    timed: list[_Calls] = []
    for name, block in _BLOCKS.items():
        grid, reason = grid_of(session, block)
        entry = Entry(name, partial(PrivateFields, grid), unfit=reason)
        timed.append(_Calls(session, entry, block.face_nbytes))

    def ceilings() -> list[Entry]:
        from mpishare.bench.cases.ceilings import entries

        return [each for each in entries(session, 8, None) if each.name == "graph launch"]

    timed += [_Calls(session, each) for each in rivals(session, "calls", {CEILINGS: ceilings})]
    for _, each in in_turns(session, timed, session.options.repeat):
        session.progress.show("calls", each.nbytes, each.entry.name)
        each.time()
    rows = [each.row() for each in timed]
    for each in reversed(timed):
        each.close()
    return rows


class _Calls:
    """One arm and the host's seconds for a call of it."""

    def __init__(self, session: Session, entry: Entry, nbytes: int = 0) -> None:
        self.session = session
        self.entry = entry
        self.nbytes = nbytes
        self.arm: Arm | None = None
        self.reason = entry.unfit
        self.is_wrong = False
        self._samples_s: list[float] = []
        self._token = 0
        if self.reason is None:
            self.arm, self.reason = session.attempt(entry.make)

    def time(self) -> None:
        """Time the calls of one turn, between checked ones. Collective."""
        session, arm = self.session, self.arm
        if arm is None or self.is_wrong:
            return
        self._check(arm)
        call = arm.call
        for _ in range(_TURNS):
            session.require_stream()
            session.synchronize()
            session.comm.Barrier()
            before = perf_counter()
            for _ in range(_CALLS):
                call()
            self._samples_s.append((perf_counter() - before) / _CALLS)
        self._check(arm)

    def _check(self, arm: Arm) -> None:
        if self.session.options.check:
            self._token += 1
            arm.checked_step(self._token)
            found = self.session.wrong_on(arm.wrong())
            if found is not None:
                self.is_wrong, self.reason = True, f"wrong result: {self.entry.name!r}: {found}"

    def row(self) -> Row:
        """Return the row. Collective."""
        session = self.session
        row = Row(
            case="calls",
            arm=self.entry.name,
            backend=session.node.backend,
            ranks=session.comm.size,
            nbytes=self.nbytes,
            clock="throughput",
            kind=self.entry.kind,
        )
        if self.reason is None:
            row.fill(max_over_ranks(session.comm, self._samples_s).tolist(), 0)
        else:
            row.fail(self.reason, wrong=self.is_wrong)
        return row

    def close(self) -> None:
        """Free the arm."""
        if self.arm is not None:
            self.session.synchronize()
            self.arm.close()

"""Case ``setup``: making a node, windows and an event; closing them is not counted.

All of it blocks the host, so that there is one clock. The rival is a window of MPI alone, made and
filled by one rank.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from mpi4py import MPI

from mpishare import Node
from mpishare.bench.arm import Arm, Entry
from mpishare.bench.contest import rivals
from mpishare.bench.measure import max_over_ranks
from mpishare.bench.rows import Row, set_ratios

if TYPE_CHECKING:
    from mpishare.bench.rows import Kind
    from mpishare.bench.session import Session

_NBYTES = 1 << 20
_FILL = 0x5A5A_5A5A_5A5A_5A5A
#: A node takes long enough that a median of few is enough.
_LEAST_TURNS = 3


def run(session: Session) -> list[Row]:
    """Run the case and return its rows. Collective, host-blocking."""
    own: list[type[_Make]] = [_MakeNode, _MakeEvent, _Allocate, _AllocateEach]
    wanted = rivals(
        session, "setup", {"allocate_shared": lambda: [Entry("allocate_shared", Arm, kind="rival")]}
    )
    makes = [kind(session) for kind in own]
    makes += [_AllocateShared(session, entry.unfit) for entry in wanted]
    for turn in range(max(session.options.repeat, _LEAST_TURNS)):
        first = turn % len(makes)
        for make in makes[first:] + makes[:first]:
            session.progress.show("setup", make.nbytes, make.name)
            make.once()
        session.progress.advance()
    rows = [make.row() for make in makes]
    set_ratios(rows, {make.name: make.against for make in makes})
    return rows


class _Make:
    """One thing that is made again and again, and the seconds that it took."""

    name = ""
    nbytes = 0
    against: tuple[str, ...] = ()
    kind: Kind = "own"

    def __init__(self, session: Session, reason: str | None = None) -> None:
        self.session = session
        self.node = session.node
        self.reason = reason
        self.is_wrong = False
        self._samples_s: list[float] = []

    def make(self) -> Any:
        """Make it and return it. Collective."""
        raise NotImplementedError

    def wrong(self, made: Any) -> int:
        """Return how many words of it are wrong."""
        raise NotImplementedError

    def free(self, made: Any) -> None:
        """Close it. Collective."""
        made.close()

    def once(self) -> None:
        """Make it once, timed, look at it and close it."""
        if self.reason is not None:
            return
        self.session.synchronize()
        self.session.comm.Barrier()
        before = perf_counter()
        made, self.reason = self.session.attempt(self.make)
        self._samples_s.append(perf_counter() - before)
        if made is None:
            return
        if self.session.options.check:
            found = self.session.wrong_on(self.wrong(made))
            if found is not None:
                self.is_wrong, self.reason = True, f"wrong result: {self.name!r}: {found}"
        self.free(made)

    def row(self) -> Row:
        """Return the row. Collective."""
        session = self.session
        row = Row(
            case="setup",
            arm=self.name,
            backend=self.node.backend,
            ranks=session.comm.size,
            nbytes=self.nbytes,
            clock="latency",
            kind=self.kind,
        )
        if self.reason is None:
            row.fill(max_over_ranks(session.comm, self._samples_s).tolist(), 0)
        else:
            row.fail(self.reason, wrong=self.is_wrong)
        return row


class _MakeNode(_Make):
    name = "Node"

    def make(self) -> Any:
        return Node(self.session.comm, timeout_s=self.session.options.timeout_s)

    def wrong(self, made: Any) -> int:
        return int(made.ranks != self.node.ranks) + int(made.rank != self.node.rank)


class _Allocate(_Make):
    name = "allocate"
    nbytes = _NBYTES
    against = ("allocate_shared",)

    def make(self) -> Any:
        return self.node.allocate((_NBYTES // 8,), "u8", fill=_FILL)

    def wrong(self, made: Any) -> int:
        return int((made.array != _FILL).sum())


class _AllocateEach(_Make):
    name = "allocate_each"
    nbytes = _NBYTES

    def make(self) -> Any:
        return self.node.allocate_each((_NBYTES // 8,), "u8", fill=_FILL)

    def wrong(self, made: Any) -> int:
        return sum(int((made.segment(rank) != _FILL).sum()) for rank in range(self.node.size))


class _MakeEvent(_Make):
    name = "event"

    def make(self) -> Any:
        return self.node.event()

    def wrong(self, made: Any) -> int:
        if self.node.is_leader:
            made.record()
        else:
            made.wait()
        self.session.synchronize()
        return 0


class _AllocateShared(_Make):
    name = "allocate_shared"
    nbytes = _NBYTES
    kind = "rival"

    def make(self) -> Any:
        comm = cast("MPI.Intracomm", self.node.comm)
        nbytes = _NBYTES if self.node.is_leader else 0
        window = MPI.Win.Allocate_shared(nbytes, 8, comm=comm)
        if self.node.is_leader:
            self._array(window).fill(_FILL)
        comm.Barrier()
        return window

    def _array(self, window: MPI.Win) -> Any:
        memory, _ = window.Shared_query(self.node.leader)
        return np.asarray(memory).view("u8")

    def wrong(self, made: Any) -> int:
        return int((self._array(made) != _FILL).sum())

    def free(self, made: Any) -> None:
        made.Free()

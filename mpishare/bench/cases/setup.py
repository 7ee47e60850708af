"""Case ``setup``: making a node, windows, an event and plans; closing them is not counted.

All of it blocks the host, so that there is one clock. The rivals are a window of MPI alone, made
and filled by one rank, and of a plan on CUDA the least that any has to do: an allgather of memory
handles, and to open those of the neighbors.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from mpi4py import MPI

from mpishare import Node
from mpishare.bench.arm import Arm, Entry
from mpishare.bench.cases.setup_make import Make
from mpishare.bench.cases.setup_plan import Handles, Plan, PlanOfMany, SecondPlan
from mpishare.bench.contest import in_turns, rivals
from mpishare.bench.rows import set_ratios

if TYPE_CHECKING:
    from mpishare.bench.rows import Row
    from mpishare.bench.session import Session

_NBYTES = 1 << 20
_FILL = 0x5A5A_5A5A_5A5A_5A5A
#: A node takes long enough that a median of few is enough.
_LEAST_TURNS = 3


def run(session: Session) -> list[Row]:
    """Run the case and return its rows. Collective, host-blocking."""
    own: list[type[Make]] = [_MakeNode, _MakeEvent, _Allocate, _AllocateEach]
    makes = [kind(session) for kind in own]
    cart = session.comm.Create_cart([session.comm.size], [True], reorder=False)
    makes += [Plan(session, cart), PlanOfMany(session, cart), SecondPlan(session, cart)]
    kinds = {kind.name: kind for kind in (_AllocateShared, Handles)}
    for entry in rivals(session, "setup", {name: partial(_rival, name) for name in kinds}):
        makes.append(kinds[entry.name](session, entry.unfit))
    for _, make in in_turns(session, makes, max(session.options.repeat, _LEAST_TURNS)):
        session.progress.show("setup", make.nbytes, make.name)
        make.once()
    rows = [make.row() for make in makes]
    set_ratios(rows, {make.name: make.against for make in makes})
    for make in reversed(makes):
        make.close()
    cart.Free()
    return rows


def _rival(name: str) -> list[Entry]:
    return [Entry(name, Arm, kind="rival")]


class _MakeNode(Make):
    name = "Node"

    def make(self) -> Any:
        return Node(self.session.comm, timeout_s=self.session.options.timeout_s)

    def wrong(self, made: Any) -> int:
        return int(made.ranks != self.node.ranks) + int(made.rank != self.node.rank)


class _Allocate(Make):
    name = "allocate"
    nbytes = _NBYTES
    against = ("allocate_shared",)

    def make(self) -> Any:
        return self.node.allocate((_NBYTES // 8,), "u8", fill=_FILL)

    def wrong(self, made: Any) -> int:
        return int((made.array != _FILL).sum())


class _AllocateEach(Make):
    name = "allocate_each"
    nbytes = _NBYTES

    def make(self) -> Any:
        return self.node.allocate_each((_NBYTES // 8,), "u8", fill=_FILL)

    def wrong(self, made: Any) -> int:
        return sum(int((made.segment(rank) != _FILL).sum()) for rank in range(self.node.size))


class _MakeEvent(Make):
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


class _AllocateShared(Make):
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

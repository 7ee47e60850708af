"""Case ``ring``: a face moved to both neighbors, and one from each, through windows.

It is a halo exchange along one axis whose faces and ghosts are buffers of their own. The baselines
move the same bytes between private memory; on CUDA MPI is staged, with one copy of both faces to
pinned memory and one of both ghosts back.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from mpi4py import MPI

from mpishare import Window
from mpishare.bench.cases import Case
from mpishare.bench.comparison import Comparison
from mpishare.bench.fence import Order, Ring, WindowRing
from mpishare.bench.grid import Problem
from mpishare.bench.halo import Forms, add_baselines
from mpishare.bench.mpi import free, isend, persistent, sendrecv
from mpishare.bench.session import Bound, Session
from mpishare.bench.staged import Staging, staged

#: Faces of memory that a rank allocates: its own, the check's, the windows' and the baselines'.
_COPIES = 20


def in_pairs(ring: Ring, *, moves: bool) -> WindowRing:
    """Return a variant by post, start, complete and wait with all peers."""

    def order(window: Window) -> Order:
        before = partial(window.post, ring.peers), partial(window.start, ring.peers)
        return before, (window.complete, window.wait)

    return WindowRing(ring, order, places=1, moves=moves)


def _staged_persistent(problem: Problem, *fields: Any) -> Bound:
    """Bind the same as staged with persistent requests."""
    staging, comm = Staging(problem, fields), problem.comm
    startall, waitall = MPI.Prequest.Startall, MPI.Request.Waitall
    sends = [comm.Send_init(*each) for each in staging.sends]
    receives = [[comm.Recv_init(*each) for each in half] for half in staging.receives]
    every = [[*half, *sends] for half in receives]

    def exchange() -> None:
        half = staging.half
        startall(receives[half])
        staging.copy_out()
        startall(sends)
        waitall(every[half])
        staging.copy_in()

    return exchange, partial(free, [*sends, *receives[0], *receives[1]])


_MPI: Forms = {
    "isend": isend,
    "persistent": persistent,
    "sendrecv": sendrecv,
    "staged": staged,
    "staged persistent": _staged_persistent,
}


def run(session: Session, case: Case) -> None:
    for nbytes in session.sizes(case, _COPIES):
        ring, sent = Ring(session, nbytes), 2 * nbytes
        comparison = Comparison(session, case, nbytes=nbytes, sent_nbytes=sent, unfit=ring.unfit)
        comparison.add("window pairwise", partial(in_pairs, ring, moves=True))
        comparison.add("window fence", partial(WindowRing, ring, moves=True))
        add_baselines(comparison, ring, _MPI)
        comparison.run()

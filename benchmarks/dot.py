"""Case ``dot``: `Allreduce.dot` of 2^20 float64 per rank.

It stands beside the same of one rank, the product of the rank's own arrays by NumPy or CuPy, and
its sum by MPI.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

import mpishare
from mpishare.bench.cases import Case
from mpishare.bench.check import Tally
from mpishare.bench.comparison import Comparison, Variant
from mpishare.bench.report import UPPER_BOUND
from mpishare.bench.session import Bound, Session, do_nothing

_COUNT = 1 << 20


def run(session: Session, case: Case) -> None:
    nbytes = 8 * _COUNT
    if session.fits(case, nbytes, 2 * nbytes):
        comparison, make = Comparison(session, case, nbytes=nbytes), partial(_Dot, session)
        alone = MPI.COMM_SELF
        comparison.add("dot", partial(make, _own, session.comm))
        comparison.add("dot of one rank", partial(make, _own, alone), kind=UPPER_BOUND)
        comparison.add("local dot", partial(make, _local, alone), kind=UPPER_BOUND)
        by_mpi = partial(make, _vdot_and_allreduce, session.comm)
        comparison.add_baseline("vdot and allreduce", by_mpi)
        comparison.run()


class _Dot(Variant):
    """A product of two arrays of integers, whose sum over the ranks of `comm` is exact."""

    moves = False

    def __init__(self, session: Session, bind: Callable[..., Bound], comm: MPI.Intracomm) -> None:
        xp = session.node.xp
        self._session, self._x, self._out = session, xp.ones(_COUNT), xp.zeros(1)
        self._size, self._ranks = comm.size, comm.allreduce(session.comm.rank)
        self.check = Tally(np)
        self.step, self._free = bind(session, comm, self._x, xp.ones(_COUNT), self._out)

    def checked_step(self, token: int) -> None:
        self._x.fill(token + self._session.comm.rank)
        self.step()
        self.check.add(float(self._out[0]) != float(_COUNT) * (self._size * token + self._ranks))

    def close(self) -> None:
        self._free()


def _own(session: Session, comm: MPI.Intracomm, x: Any, y: Any, out: Any) -> Bound:
    total = mpishare.Allreduce(comm, mpishare.Layout((1,)), node=session.node)
    return partial(total.dot, x, y, out), total.close


def _local(session: Session, comm: MPI.Intracomm, x: Any, y: Any, out: Any) -> Bound:  # noqa: ARG001
    vdot = session.node.xp.vdot

    def dot() -> None:
        out[0] = vdot(x, y)

    return dot, do_nothing


def _vdot_and_allreduce(session: Session, comm: MPI.Intracomm, x: Any, y: Any, out: Any) -> Bound:
    vdot = session.node.xp.vdot

    def dot() -> None:
        out[0] = comm.allreduce(float(vdot(x, y)))

    return dot, do_nothing

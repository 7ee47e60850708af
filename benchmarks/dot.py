"""Case ``dot``: `Allreduce.dot` of 2^20 float64 per rank.

It stands beside the same of one rank, the product of the rank's own arrays by NumPy or CuPy, and
its sum by MPI.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mpi4py import MPI

import mpishare
from mpishare.bench.comparison import Comparison, Variant
from mpishare.bench.report import BASELINE, UPPER_BOUND

if TYPE_CHECKING:
    from mpishare.bench.cases import Case
    from mpishare.bench.report import Row
    from mpishare.bench.session import Session


_DOT_COUNT = 1 << 20


def run(session: Session, case: Case) -> list[Row]:
    """Run the case and return its rows. Collective, host-blocking."""
    nbytes = 8 * _DOT_COUNT
    if not session.fits(case, nbytes, 2 * nbytes):
        return []
    comparison = Comparison(session, case, nbytes=nbytes)
    comparison.add("dot", partial(_Dot, session))
    comparison.add("dot of one rank", partial(_DotAlone, session), kind=UPPER_BOUND)
    comparison.add("local dot", partial(_LocalDot, session), kind=UPPER_BOUND)
    if comparison.includes("vdot and allreduce"):
        comparison.add("vdot and allreduce", partial(_MpiDot, session), kind=BASELINE)
    return comparison.run()


class _Dot(Variant):
    """`Allreduce.dot` of two arrays of integers, whose sum is exact."""

    moves = False

    def __init__(self, session: Session) -> None:
        xp = session.node.xp
        self.session, self.xp = session, xp
        self.x, self.y = xp.ones(_DOT_COUNT), xp.ones(_DOT_COUNT)
        self.out = xp.zeros(1)
        self.total: mpishare.Allreduce | None = None
        self.open()
        self._wrong = 0

    def open(self) -> None:
        """Make the sum over all ranks."""
        self.make(self.session.comm)

    def make(self, comm: MPI.Intracomm) -> None:
        """Make the sum over some ranks. Collective."""
        layout = mpishare.Layout((1,))
        self.total = mpishare.Allreduce(comm, layout, node=self.session.node)
        self.step = partial(self.total.dot, self.x, self.y, self.out)  # type: ignore[method-assign]

    def expected(self, token: int) -> float:
        size = self.session.comm.size
        return float(_DOT_COUNT) * (size * token + sum(range(size)))

    def checked_step(self, token: int) -> None:
        self.x.fill(token + self.session.comm.rank)
        self.step()
        self._wrong += float(self.out[0]) != self.expected(token)

    def wrong(self) -> int:
        wrong, self._wrong = self._wrong, 0
        return wrong

    def close(self) -> None:
        self.session.synchronize()
        if self.total is not None:
            self.total.close()


class _DotAlone(_Dot):
    """The same of the rank's own arrays alone."""

    def open(self) -> None:
        self.make(MPI.COMM_SELF)

    def expected(self, token: int) -> float:
        return float(_DOT_COUNT) * (token + self.session.comm.rank)


class _LocalDot(_DotAlone):
    """Their product by NumPy or CuPy."""

    def open(self) -> None:
        pass

    def step(self) -> None:
        self.out[0] = self.xp.vdot(self.x, self.y)


class _MpiDot(_LocalDot):
    """Their product as a float, and its sum by MPI."""

    def expected(self, token: int) -> float:
        return _Dot.expected(self, token)

    def step(self) -> None:
        self.out[0] = self.session.comm.allreduce(float(self.xp.vdot(self.x, self.y)))

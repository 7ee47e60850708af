"""Case ``allreduce``: sums over all ranks, in place.

Timed are `Allreduce.reduce`: called, captured into a graph, and twenty in one graph, of which a
twentieth is the time. Its rows are of float64; ``complex128`` has as many bytes. ``exact`` is
rounded once; ``dot`` and ``exact dot`` are products of the array with itself. On the host
``window`` has its array in a window. The baselines are what MPI, NCCL and others have:
``allreduce`` is `MPI_Allreduce` of host memory, ``staged`` the same between copies from and to
pinned memory, ``float`` what most programs do with a number on the GPU: read it, reduce, write it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

import mpishare
from mpishare.bench.cases import Case
from mpishare.bench.check import Tally
from mpishare.bench.comparison import Comparison
from mpishare.bench.grid import Exchange, Problem
from mpishare.bench.library import IN_GRAPHS, add_collectives, add_with_graphs
from mpishare.bench.session import Bound, Session, do_nothing
from mpishare.bench.staged import through_host

_ARRAYS = 4  # of the size of a message: the array, the sum, and what the check needs


def run(session: Session, case: Case) -> None:
    for nbytes in session.sizes(case, _ARRAYS):
        comparison = Comparison(session, case, nbytes=nbytes, sent_nbytes=nbytes)
        make = partial(_sum, session, nbytes)
        add_with_graphs(comparison, "reduce", partial(make, _own), IN_GRAPHS)
        if not session.on_cuda:
            comparison.add("window", partial(make, _own, in_windows=True))
        comparison.add("exact", partial(make, partial(_own, exact=True)))
        # Of which one number travels: no baseline does the same.
        comparison.add("dot", partial(_product, session, nbytes, exact=False), against=())
        comparison.add("exact dot", partial(_product, session, nbytes, exact=True), against=())
        if nbytes >= 16:
            comparison.add("complex128", partial(make, _own, dtype="c16"))
        by_mpi = {"allreduce": _by_mpi, "staged": _staged}
        for name, bind in (by_mpi | {"float": _of_float} if nbytes == 8 else by_mpi).items():
            comparison.add_baseline(name, partial(make, bind))
        add_collectives(comparison, make, lambda library, array: library.bind_sum(array))
        comparison.run()


class _Numbers(Problem, Tally):
    """An array of numbers and its check, after so many sums of it over all ranks.

    Timed with zeros, whose sum is zero at every step; a checked step has integers, whose sum is
    exact in any order.
    """

    fields = ()  # each variant has its own

    def __init__(self, session: Session, nbytes: int, dtype: str, sums: int) -> None:
        super().__init__(session.node.xp)
        self.session, self.comm, self.check, self._sums = session, session.comm, self, sums
        self._dtype = np.dtype(dtype)
        self._place = session.node.xp.arange(nbytes // self._dtype.itemsize) % 61

    def arrays(self, allocate: Callable[..., Any]) -> Sequence[Any]:
        return (allocate(self._place.shape, self._dtype),)

    def fill(self, fields: Sequence[Any], token: int) -> None:
        fields[0][...] = self._place + (token % 97 + self.comm.rank)

    def poison(self, fields: Sequence[Any]) -> None:
        fields[0][...] = 0

    def verify(self, fields: Sequence[Any], token: int) -> None:
        size = self.comm.size
        once = self._place * float(size) + (size * (token % 97) + sum(range(size)))
        self.add((fields[0] != once * float(size) ** (self._sums - 1)).sum())


class _Products(_Numbers):
    """An array of integers, and a number: the sum of all ranks' squares, exact in any order."""

    def __init__(self, session: Session, nbytes: int) -> None:
        super().__init__(session, nbytes, "f8", 1)

    def arrays(self, allocate: Callable[..., Any]) -> Sequence[Any]:
        return (*super().arrays(allocate), allocate((1,), self._dtype))

    def poison(self, fields: Sequence[Any]) -> None:
        fields[1][...] = 0

    def verify(self, fields: Sequence[Any], token: int) -> None:
        shifts = [token % 97 + rank for rank in range(self.comm.size)]
        place = self._place.astype(float)
        squares = sum(((place + shift) ** 2).sum() for shift in shifts)
        self.add((fields[1] != squares).sum())


def _product(session: Session, nbytes: int, *, exact: bool) -> Exchange[_Products]:
    """Make an array that is multiplied with itself, again and again."""
    products = _Products(session, nbytes)

    def bind(products: _Products, array: Any, number: Any) -> Bound:
        comm, node = products.comm, products.session.node
        total = mpishare.Allreduce(comm, array, exact=exact, node=node)
        return partial(total.dot, array, array, out=number), total.close

    made = Exchange(products, bind, products.arrays(session.node.xp.zeros))
    made.moves = False
    return made


def _sum(
    session: Session,
    nbytes: int,
    bind: Callable[..., Bound],
    *,
    dtype: str = "f8",
    steps: int = 1,
    in_windows: bool = False,
    allocate: Callable[..., Any] | None = None,
) -> Exchange[_Numbers]:
    """Make an array that is replaced by its sum over all ranks, again and again."""
    numbers = _Numbers(session, nbytes, dtype, steps)
    fields = () if in_windows else numbers.arrays(allocate or session.node.xp.zeros)
    made = Exchange(numbers, bind, fields, steps=steps, in_windows=in_windows)
    made.moves = False
    return made


def _own(numbers: _Numbers, array: Any, *, exact: bool = False) -> Bound:
    total = mpishare.Allreduce(numbers.comm, array, exact=exact, node=numbers.session.node)
    return partial(total.reduce, array), total.close


def _by_mpi(numbers: _Numbers, array: Any) -> Bound:
    return partial(numbers.comm.Allreduce, MPI.IN_PLACE, array), do_nothing


def _staged(numbers: _Numbers, array: Any) -> Bound:
    return through_host(numbers.session, partial(_by_mpi, numbers), array)


def _of_float(numbers: _Numbers, array: Any) -> Bound:
    comm = numbers.comm
    return lambda: array.fill(comm.allreduce(float(array[0]))), do_nothing

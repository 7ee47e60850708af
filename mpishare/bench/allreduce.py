"""Case ``allreduce``: sums over all ranks, in place.

Timed are `Allreduce.reduce`: called, captured into a graph, and twenty in one graph, of which a
twentieth is the time. Its rows are of float64; ``complex128`` has as many bytes. On the host
``window`` has its array in a window. The baselines are what MPI, NCCL and others have:
``allreduce`` is `MPI_Allreduce` of host memory, ``staged`` the same between copies from and to
pinned memory, ``float`` what most programs do with a number on the GPU: read it, reduce, write it.
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
from mpishare.bench.library import IN_GRAPHS, Library, add_with_graphs, collectives
from mpishare.bench.session import Session, do_nothing
from mpishare.bench.staged import through_host

Bound = tuple[Callable[[], object], Callable[[], object]]


_ARRAYS = 4  # of the size of a message: the array, the sum, and what the check needs


def run(session: Session, case: Case) -> None:
    for nbytes in session.sizes(case, _ARRAYS):
        _run(session, case, nbytes)


def _run(session: Session, case: Case, nbytes: int) -> None:
    comparison = Comparison(session, case, nbytes=nbytes, sent_nbytes=nbytes)
    make = partial(Sum, session, nbytes)

    graphs = IN_GRAPHS if session.on_cuda else ()
    add_with_graphs(comparison, "reduce", partial(make, own_sum), graphs)
    if not session.on_cuda:
        comparison.add("window", partial(make, own_sum, in_window=True))
    if nbytes >= 16:
        comparison.add("complex128", partial(make, own_sum, dtype="c16"))
    comparison.add_baselines("allreduce", {"allreduce": partial(make, _mpi_sum)})
    comparison.add_baselines("staged", {"staged": partial(make, _staged_sum)})
    if nbytes == 8:
        comparison.add_baselines("float", {"float": partial(make, _float_sum)})
    for name, library, arguments, in_graphs in collectives(comparison):
        make_sum, graphs = partial(_sum_by, library, make), IN_GRAPHS if in_graphs else ()
        add_with_graphs(comparison, name, make_sum, graphs, **arguments)
    comparison.run()


def _sum_by(library: Library, make: Callable[..., Variant], steps: int = 1) -> Variant:
    allocate = None if library.is_direct else library.empty
    return make(partial(_library_sum, library), steps=steps, allocate=allocate)


class Sum(Variant):
    """An array of numbers that is replaced by its sum over all ranks, again and again.

    Timed with zeros, whose sum is zero at every step; a checked step has integers, whose sum is
    exact in any order. `bind` returns the call that sums an array, and the call that frees what
    that needs; `allocate` returns zeros for so many words of 8 bytes.
    """

    moves = False

    def __init__(
        self,
        session: Session,
        nbytes: int,
        bind: Callable[[Session, Any], Bound],
        *,
        dtype: str = "f8",
        steps: int = 1,
        in_window: bool = False,
        allocate: Callable[[int], Any] | None = None,
    ) -> None:
        node, xp, kind = session.node, session.node.xp, np.dtype(dtype)
        count = nbytes // kind.itemsize
        self._window = node.allocate_each(count, kind, fill=0) if in_window else None
        if allocate is not None:
            self.array = allocate(nbytes // 8).view(kind)
        else:
            self.array = xp.zeros(count, kind) if self._window is None else self._window.array
        self._place = xp.arange(count) % 61
        self.check = Tally(xp)
        self._session, self.steps = session, steps
        self._sum, self._free = bind(session, self.array)

    def step(self) -> None:
        for _ in range(self.steps):
            self._sum()

    def check_around(self, step: Callable[[], None], token: int) -> None:
        comm = self._session.comm
        mine, every = token % 97 + comm.rank, comm.size * (token % 97) + sum(range(comm.size))
        self.array[...] = self._place + mine
        step()
        wanted = (self._place * float(comm.size) + every) * float(comm.size) ** (self.steps - 1)
        self.check.add((self.array != wanted).sum())
        self.array[...] = 0

    def close(self) -> None:
        self._session.synchronize()
        del self._sum
        self._free()
        del self.array
        if self._window is not None:
            self._window.close()


def own_sum(session: Session, array: Any) -> Bound:
    total = mpishare.Allreduce(session.comm, array, node=session.node)
    return partial(total.reduce, array), total.close


def _library_sum(library: Library, session: Session, array: Any) -> Bound:
    free = session.synchronize if library.is_direct else partial(library.free, array.view("u8"))
    return library.bind_sum(array), free


def _mpi_sum(session: Session, array: Any) -> Bound:
    return partial(session.comm.Allreduce, MPI.IN_PLACE, array), do_nothing


def _staged_sum(session: Session, array: Any) -> Bound:
    return through_host(session, partial(_mpi_sum, session), array)


def _float_sum(session: Session, array: Any) -> Bound:
    comm = session.comm

    def sum_() -> None:
        array.fill(comm.allreduce(float(array[0])))

    return sum_, do_nothing

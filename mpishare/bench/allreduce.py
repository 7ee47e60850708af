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
from mpishare.bench.session import Bound, Call, Session, do_nothing, in_turn
from mpishare.bench.staged import through_host

_ARRAYS = 4  # of the size of a message: the array, the sum, and what the check needs


def run(session: Session, case: Case) -> None:
    for nbytes in session.sizes(case, _ARRAYS):
        comparison = Comparison(session, case, nbytes=nbytes, sent_nbytes=nbytes)
        make = partial(_Sum, session, nbytes)
        graphs = IN_GRAPHS if session.on_cuda else ()
        add_with_graphs(comparison, "reduce", partial(make, _own_sum), graphs)
        if not session.on_cuda:
            comparison.add("window", partial(make, _own_sum, in_window=True))
        if nbytes >= 16:
            comparison.add("complex128", partial(make, _own_sum, dtype="c16"))
        by_mpi = {"allreduce": _mpi_sum, "staged": _staged_sum}
        for name, bind in (by_mpi | {"float": _float_sum} if nbytes == 8 else by_mpi).items():
            comparison.add_baselines(name, {name: partial(make, bind)})
        for name, library, arguments, in_graphs in collectives(comparison):
            make_sum = partial(_sum_by, library, make)
            add_with_graphs(comparison, name, make_sum, in_graphs, **arguments)
        comparison.run()


def _sum_by(library: Library, make: Callable[..., Variant], steps: int = 1) -> Variant:
    allocate = None if library.is_direct else library.empty
    return make(partial(_library_sum, library), steps=steps, allocate=allocate)


class _Sum(Variant):
    """An array of numbers that is replaced by its sum over all ranks, again and again.

    Timed with zeros, whose sum is zero at every step; a checked step has integers, whose sum is
    exact in any order. `bind` gets the session and the array; `allocate` returns zeros for so many
    words of 8 bytes.
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
        call, self._free = bind(session, self.array)
        self.call = in_turn(*[call] * steps)

    def check_around(self, step: Call, token: int) -> None:
        comm = self._session.comm
        mine, every = token % 97 + comm.rank, comm.size * (token % 97) + sum(range(comm.size))
        self.array[...] = self._place + mine
        step()
        wanted = (self._place * float(comm.size) + every) * float(comm.size) ** (self.steps - 1)
        self.check.add((self.array != wanted).sum())
        self.array[...] = 0

    def close(self) -> None:
        self._session.synchronize()
        del self.call
        self._free()
        del self.array
        if self._window is not None:
            self._window.close()


def _own_sum(session: Session, array: Any) -> Bound:
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
    return lambda: array.fill(session.comm.allreduce(float(array[0]))), do_nothing

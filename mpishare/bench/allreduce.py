"""Case ``allreduce``: sums over all ranks, in place.

Timed are `Allreduce.reduce`: called, captured into a graph, and twenty in one graph, of which a
twentieth is the time. Its rows are of float64; ``complex128`` has as many bytes. On the host
``window`` has its array in a window. The baselines are what MPI, NCCL and others have:
``allreduce`` is `MPI_Allreduce` of host memory, ``staged`` the same between copies from and to
pinned memory, ``float`` what most programs do with a number on the GPU: read it, reduce, write it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

import mpishare
from mpishare.bench.cases import LIBRARIES
from mpishare.bench.comparison import Comparison, Variant
from mpishare.bench.library import add_reductions, captured
from mpishare.bench.session import do_nothing

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.bench.cases import Case
    from mpishare.bench.report import Row
    from mpishare.bench.session import Session

    Bound = tuple[Callable[[], object], Callable[[], object]]


_IN_GRAPH = 20
_ARRAYS = 4  # of the size of a message: the array, the sum, and what the check needs
_TO_DEVICE, _TO_HOST = 1, 2  # cudaMemcpyKind


def run(session: Session, case: Case) -> list[Row]:
    """Run the case and return its rows. Collective, host-blocking."""
    rows: list[Row] = []
    for nbytes in session.options.sizes(session.node.backend, case.name):
        if session.fits(case, nbytes, _ARRAYS * nbytes):
            rows += _run_size(session, case, nbytes)
    return rows


def _run_size(session: Session, case: Case, nbytes: int) -> list[Row]:
    comparison = Comparison(session, case, nbytes=nbytes, sent_nbytes=nbytes)
    make = partial(Sum, session, nbytes)
    comparison.add("reduce", partial(make, own_sum))
    if session.on_cuda:
        for name, steps in (("reduce graph", 1), (f"reduce graph of {_IN_GRAPH}", _IN_GRAPH)):
            comparison.add(name, captured(session, partial(make, own_sum, steps=steps)))
    else:
        comparison.add("window", partial(make, own_sum, in_window=True))
    if nbytes >= 16:
        comparison.add("complex128", partial(make, own_sum, dtype="c16"))
    comparison.add_baselines("allreduce", {"allreduce": partial(make, _mpi_sum)})
    comparison.add_baselines("staged", {"staged": partial(make, _staged_sum)})
    if nbytes == 8:
        comparison.add_baselines("float", {"float": partial(make, _float_sum)})
    for name in LIBRARIES:
        add_reductions(comparison, name, session, make, _IN_GRAPH)
    return comparison.run()


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
        self._wrong = xp.zeros((), "i8")
        self._session = session
        self.steps = steps
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
        self._wrong += (self.array != wanted).sum()
        self.array[...] = 0

    def wrong(self) -> int:
        wrong = int(self._wrong)
        self._wrong.fill(0)
        return wrong

    def close(self) -> None:
        self._session.synchronize()
        del self._sum
        self._free()
        del self.array
        if self._window is not None:
            self._window.close()

    def checked_step(self, token: int) -> None:
        self.check_around(self.step, token)


def own_sum(session: Session, array: Any) -> Bound:
    """Return `Allreduce.reduce` of an array. Collective."""
    total = mpishare.Allreduce(session.comm, array, node=session.node)
    return partial(total.reduce, array), total.close


def _mpi_sum(session: Session, array: Any) -> Bound:
    return partial(session.comm.Allreduce, MPI.IN_PLACE, array), do_nothing


def _staged_sum(session: Session, array: Any) -> Bound:
    import cupyx

    comm, stream = session.comm, session.stream
    pinned = cupyx.zeros_pinned(array.shape, array.dtype)
    memcpy, synchronize = session.node.xp.cuda.runtime.memcpyAsync, session.synchronize
    there, here, nbytes = int(array.data.ptr), int(pinned.ctypes.data), int(array.nbytes)

    def sum_() -> None:
        memcpy(here, there, nbytes, _TO_HOST, int(stream.ptr))
        synchronize()
        comm.Allreduce(MPI.IN_PLACE, pinned)
        memcpy(there, here, nbytes, _TO_DEVICE, int(stream.ptr))

    return sum_, synchronize


def _float_sum(session: Session, array: Any) -> Bound:
    comm = session.comm

    def sum_() -> None:
        array.fill(comm.allreduce(float(array[0])))

    return sum_, do_nothing

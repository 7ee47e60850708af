"""Cases ``redistribute``, ``permuted`` and ``allgather``: a global array, distributed otherwise.

n * n * n complex128 are cut along the first axis and wanted along the second, in ``permuted`` with
the axes of the result in the order (1, 2, 0); ``allgather`` brings float64 of every rank to all.
`Redistribute.forward` is timed on any arrays and on arrays in windows, called and captured into a
graph. The baselines are what MPI has for it, with datatypes or packed, on the host and through it,
and libraries between GPUs with kernels that pack and unpack. Cells that stay on their rank are
copied there, except where a collective of MPI takes them with the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np
from mpi4py import MPI

import mpishare
from mpishare.bench import mpi
from mpishare.bench.cases import Case
from mpishare.bench.check import Check, Part, word
from mpishare.bench.comparison import Comparison
from mpishare.bench.copies import Copies, copy_all
from mpishare.bench.grid import ITEM_NBYTES, Exchange, Problem, Side, Slices
from mpishare.bench.halo import Forms, add_baselines
from mpishare.bench.library import (
    IN_GRAPHS,
    Library,
    add_collectives,
    add_with_graphs,
)
from mpishare.bench.session import Bound, Call, Session, do_nothing, in_turn
from mpishare.bench.staged import address_of, memory_of, staged, through_host

#: Binds the call that brings a source to a target.
Bind = Callable[["Spread", Any, Any], Bound]

#: Parts of memory that a rank needs for all variants: arrays, those of the check, staging, buffers.
_PARTS = {"host": 20, "cuda": 36}


def run(session: Session, case: Case) -> None:
    ranks, parts = session.comm.size, _PARTS[session.node.backend]
    is_cube = case.name != "allgather"

    def of_size(nbytes: int) -> tuple[tuple[int, ...], int, int]:
        cells = ranks * nbytes // 16
        shape = (max(round(cells ** (1 / 3)), 2),) * 3 if is_cube else (ranks * nbytes // 8,)
        part = 16 * prod(shape) // ranks if is_cube else ranks * nbytes
        return shape, part, parts * part

    for shape in session.blocks(case, of_size):
        problem = Spread(session, shape, *_SPREADS[case.name])
        comparison = Comparison(
            session,
            case,
            nbytes=problem.nbytes,
            sent_nbytes=problem.sent_nbytes,
            unfit=problem.unfit,
            n=shape[0] if is_cube else None,
        )
        graphs = IN_GRAPHS[:1] if is_cube else IN_GRAPHS
        for name, in_windows in (("private", False), ("windows", True)):
            make = partial(Exchange, problem, _own, in_windows=in_windows)
            add_with_graphs(comparison, name, make, graphs)
        (_enter_transposes if is_cube else _enter_gathers)(comparison, problem)
        comparison.run()


#: The axis that the target cuts, the dtype, the order of the axes.
_SPREADS = {
    "redistribute": (1, "c16", None),
    "permuted": (1, "c16", (1, 2, 0)),
    "allgather": (None, "f8", None),
}


class Spread(Problem):
    """A global array, cut along its first axis and wanted otherwise.

    `target` is the axis that is cut then, None where all ranks want the whole, and `permute` the
    order of the axes in a part of the target. Side k has the cells for the rank k after this one.
    What a rank must get is found from the coordinates of each cell: its word names the rank in
    whose part of the source it is, and its index in the global array.
    """

    def __init__(
        self,
        session: Session,
        shape: tuple[int, ...],
        target: int | None,
        dtype: str,
        permute: tuple[int, ...] | None,
    ) -> None:
        comm = session.comm
        self.session, self.comm = session, comm
        self.shape, self.target, self.permute = shape, target, permute
        self.dtype = np.dtype(dtype)
        self._order = permute or tuple(range(len(shape)))
        # Stands for the global array, which no rank has.
        self._whole = np.broadcast_to(np.zeros((), self.dtype), shape)
        self._cuts = [np.array_split(range(extent), comm.size) for extent in shape]
        rank, size = comm.rank, comm.size
        out, into = self.by_rank()
        steps = ((k, (rank + k) % size, (rank - k) % size) for k in range(1, size))
        self.sides = tuple(
            Side(to, source, k - 1, out[to], into[source]) for k, to, source in steps
        )
        self.nbytes = self._whole.nbytes // size
        self.sent_nbytes = sum(self._nbytes_for(rank, side.to) for side in self.sides)
        _, self.unfit = session.attempt(self._allocate)

    def _cut(self, axis: int | None, rank: int) -> Slices:
        """Return which cells of an array that has all along an axis are in the part of a rank."""
        index = [slice(None)] * len(self.shape)
        if axis is not None:
            begin = sum(map(len, self._cuts[axis][:rank]))
            index[axis] = slice(begin, begin + len(self._cuts[axis][rank]))
        return tuple(index)

    def _nbytes_for(self, rank: int, to: int) -> int:
        return self._whole[self._cut(0, rank)][self._cut(self.target, to)].nbytes

    def _allocate(self) -> None:
        xp, rank = self.session.node.xp, self.comm.rank
        sent = self._words(self._cut(0, rank), tuple(range(len(self.shape))))
        wanted = self._words(self._cut(self.target, rank), self._order)
        self.fields = self.arrays(xp.zeros)
        parts = [Part(0, ..., sent)], [Part(1, ..., wanted)]
        self.check = Check(xp, self.fields, *parts, [(1, ...)])

    def arrays(self, allocate: Callable[..., Any]) -> Sequence[Any]:
        """Return this rank's parts of source and target."""
        source = self._whole[self._cut(0, self.comm.rank)]
        target = self._whole[self._cut(self.target, self.comm.rank)].transpose(self._order)
        return allocate(source.shape, self.dtype), allocate(target.shape, self.dtype)

    def _words(self, cells: Slices, order: tuple[int, ...]) -> Any:
        """Return the words of these cells in step 0, by the order of the axes."""
        xp = self.session.node.xp
        counts = [*map(len, self._cuts[0])]
        owners = xp.asarray(np.repeat(range(self.comm.size), counts))
        index = xp.zeros((), "i8")
        along = xp.ix_(*(xp.arange(n)[span] for n, span in zip(self.shape, cells, strict=True)))
        for extent, at in zip(self.shape, along, strict=True):
            index = index * extent + at
        owner = owners[cells[0]].reshape(-1, *[1] * (len(self.shape) - 1))
        first = (index + owner * word(1, 0, 0)).transpose(order)
        number = xp.arange(self.dtype.itemsize // ITEM_NBYTES) * word(0, 1, 0)
        words = (first[..., None] + number).astype("u8")
        return words.reshape(*first.shape[:-1], first.shape[-1] * len(number))

    def by_rank(self) -> tuple[list[Slices], list[Slices]]:
        """Return the cells of the source that each rank wants, and those of the target from it."""
        ranks = range(self.comm.size)
        return [self._cut(self.target, rank) for rank in ranks], [self._cut(0, r) for r in ranks]

    def cells(self, target: Any) -> Any:
        """Return a view of a part of the target with the axes of the global array."""
        return target.transpose(np.argsort(self._order).tolist())

    def ends(self, fields: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        return fields[:1], [self.cells(fields[1])]

    def own(self, fields: Sequence[Any]) -> Copies:
        out, into = (cells[self.comm.rank] for cells in self.by_rank())
        return [(self.cells(fields[1])[into], fields[0][out])]

    def slots(self) -> list[int]:
        size = self.comm.size
        return [
            max(self._nbytes_for(rank, (rank + k) % size) for rank in range(size)) // ITEM_NBYTES
            for k in range(1, size)
        ]


def _own(problem: Spread, source: Any, target: Any) -> Bound:
    plan = mpishare.Redistribute(
        problem.comm,
        problem.shape,
        0,
        problem.target,
        problem.dtype,
        permute=problem.permute,
        node=problem.session.node,
    )
    return partial(plan.forward, source, target), plan.close


def _typed(problem: Spread, source: Any, target: Any) -> Bound:
    """Bind `MPI_Alltoallw` with a datatype of the cells for and from each rank."""
    made, ends = [], []
    for array, cells in zip((source, target), problem.by_rank(), strict=True):
        views = [array[each] for each in cells]
        types = [mpi.datatype(view) for view in views]
        offsets = [address_of(view) - address_of(array) if view.size else 0 for view in views]
        made += types
        ends.append([memory_of(array), [1] * len(views), offsets, types])
    return partial(problem.comm.Alltoallw, *ends), partial(mpi.free, made)


def _packed(problem: Spread, source: Any, target: Any) -> Bound:
    """Bind `MPI_Alltoallv` with copies that pack and unpack around it; own cells are copied."""
    session, size = problem.session, problem.comm.size
    words = max(sum(problem.slots()), 1)
    buffers = out, into = [session.node.xp.zeros(words, "u8") for _ in range(2)]
    pack, unpack = problem.packing((source, target), out, into)
    ends = []
    for buffer, parts in zip((out, into), problem.parts(out, into), strict=True):
        counts, offsets = [0] * size, [0] * size
        for side, part in zip(problem.sides, parts, strict=True):
            peer = side.to if buffer is out else side.source
            counts[peer] = int(part.size)
            offsets[peer] = (address_of(part) - address_of(buffer)) // ITEM_NBYTES
        ends.append([memory_of(buffer), (counts, offsets), MPI.UINT64_T])

    exchange = partial(problem.comm.Alltoallv, *ends)  # which has addresses only
    return in_turn(pack, session.synchronize, exchange, unpack), buffers.clear


def _gather(problem: Spread, source: Any, target: Any) -> Bound:
    ends = [[memory_of(array), MPI.BYTE] for array in (source, target)]
    return partial(problem.comm.Allgather, *ends), do_nothing


def _staged(bind: Bind, problem: Spread, source: Any, target: Any) -> Bound:
    """Bind the same between copies from and to pinned memory."""
    return through_host(problem.session, partial(bind, problem), source, target)


def _then_permuted(bind: Bind, problem: Spread, source: Any, target: Any) -> Bound:
    """Bind a call that keeps the order of the axes, and a copy that changes it where it must.

    Datatypes of permuted cells are slower than both.
    """
    if problem.permute is None:
        return bind(problem, source, target)
    ordered = problem.session.node.xp.zeros(problem.cells(target).shape, problem.dtype)
    call, free = bind(problem, source, ordered)
    permute = copy_all(problem.session, [(problem.cells(target), ordered)])
    return in_turn(call, permute), free


def _enter_transposes(comparison: Comparison, problem: Spread) -> None:
    add_baselines(
        comparison,
        problem,
        {
            "staged": staged,
            "staged alltoallw": partial(_then_permuted, partial(_staged, _typed)),
            "alltoallw": partial(_then_permuted, _typed),
            "alltoallv": _packed,
        },
    )


def _enter_gathers(comparison: Comparison, problem: Spread) -> None:
    binds: Forms = {"allgather": _gather, "staged": partial(_staged, _gather)}
    for name, bind in binds.items():
        comparison.add_baseline(name, partial(Exchange, problem, bind))

    def make(bind: Bind, allocate: Callable[..., Any], steps: int) -> Exchange[Spread]:
        return Exchange(problem, bind, problem.arrays(allocate), steps=steps)

    def by_library(library: Library, source: Any, target: Any) -> Call:
        return library.bind_gather(source.view("u8"), target.view("u8"))

    add_collectives(comparison, make, by_library)

"""Cases ``redistribute``, ``permuted`` and ``allgather``: a global array, spread another way.

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
from itertools import accumulate
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
from mpishare.bench.cuda_mpi import CudaMpi
from mpishare.bench.grid import ITEM_NBYTES, Call, Exchange, Problem, Side, Slices
from mpishare.bench.halo import add_baselines
from mpishare.bench.library import (
    IN_GRAPHS,
    Library,
    add_with_graphs,
    collectives,
    open_library,
)
from mpishare.bench.report import BASELINE
from mpishare.bench.session import Session, do_nothing
from mpishare.bench.staged import Staged, address_of, through_host

#: Returns the call that brings a source to a target, and the one that frees what that needs.
Bind = Callable[["Spread", Any, Any], tuple[Call, Call]]

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
        graphs = (1,) if is_cube else IN_GRAPHS
        for name, kind in (("private", Called), ("windows", InWindows)):
            make = partial(kind, problem, _own)
            add_with_graphs(comparison, name, make, graphs if session.on_cuda else ())
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
    order of the axes in a part of the target. Side k has the cells for the rank k places on. What a
    rank must get is found from the coordinates of each cell: its word names the rank in whose part
    of the source it is, and its place in the global array.
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
        rank, size = comm.rank, comm.size
        parts = (map(len, np.array_split(range(extent), size)) for extent in shape)
        self._ends = [[0, *accumulate(each)] for each in parts]
        out, into = self.by_rank()
        steps = ((k, (rank + k) % size, (rank - k) % size) for k in range(1, size))
        self.sides = tuple(
            Side(to, source, k - 1, out[to], into[source]) for k, to, source in steps
        )
        self.nbytes = self.dtype.itemsize * prod(shape) // size
        self.sent_nbytes = self.dtype.itemsize * sum(
            self._count(rank, side.to) for side in self.sides
        )
        _, self.unfit = session.attempt(self._allocate)

    def _cut(self, axis: int | None, rank: int) -> Slices:
        """Return which cells of an array that has all along an axis are in the part of a rank."""
        index = [slice(None)] * len(self.shape)
        if axis is not None:
            index[axis] = slice(*self._ends[axis][rank : rank + 2])
        return tuple(index)

    def _count(self, rank: int, to: int) -> int:
        """Return how many cells one rank has for another."""
        cells = list(self.shape)
        for axis, each in ((0, rank), (self.target, to)):
            if axis is not None:
                cells[axis] = self._ends[axis][each + 1] - self._ends[axis][each]
        return prod(cells)

    def _allocate(self) -> None:
        xp, rank = self.session.node.xp, self.comm.rank
        sent = self._words(self._cut(0, rank), tuple(range(len(self.shape))))
        wanted = self._words(self._cut(self.target, rank), self._order)
        self.fields = self.arrays(xp.zeros)
        parts = [Part(0, ..., sent)], [Part(1, ..., wanted)]
        self.check = Check(xp, self.fields, *parts, [(1, ...)])

    def arrays(self, allocate: Callable[..., Any]) -> tuple[Any, Any]:
        """Return this rank's parts of source and target, from an allocator."""
        whole, rank = np.broadcast_to(0, self.shape), self.comm.rank
        source = whole[self._cut(0, rank)].shape
        target = whole[self._cut(self.target, rank)].transpose(self._order).shape
        return allocate(source, self.dtype), allocate(target, self.dtype)

    def _words(self, cells: Slices, order: tuple[int, ...]) -> Any:
        """Return the words of these cells in step 0, by the order of the axes."""
        xp = self.session.node.xp
        owners = xp.asarray(np.repeat(range(self.comm.size), np.diff(self._ends[0])))
        place = xp.zeros((), "i8")
        for axis, extent in enumerate(self.shape):
            along = [1] * len(self.shape)
            along[axis] = -1
            place = place * extent + xp.arange(extent)[cells[axis]].reshape(along)
        owner = owners[cells[0]].reshape(-1, *[1] * (len(self.shape) - 1))
        first = (place + owner * word(1, 0, 0)).transpose(order)
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

    def leaving(self, side: Side, fields: Sequence[Any]) -> list[Any]:
        return [fields[0][side.out]]

    def arriving(self, side: Side, fields: Sequence[Any]) -> list[Any]:
        return [self.cells(fields[1])[side.into]]

    def own(self, fields: Sequence[Any]) -> Copies:
        out, into = (cells[self.comm.rank] for cells in self.by_rank())
        return [(self.cells(fields[1])[into], fields[0][out])]

    def slots(self) -> list[int]:
        size, words = self.comm.size, self.dtype.itemsize // ITEM_NBYTES
        return [
            words * max(self._count(rank, (rank + k) % size) for rank in range(size))
            for k in range(1, size)
        ]

    def sides_by_axis(self) -> Sequence[tuple[Side, ...]]:
        return [(side,) for side in self.sides]


class Called(Exchange[Spread]):
    """One call that brings the source to the target."""

    def __init__(
        self, problem: Spread, bind: Bind, fields: Sequence[Any] | None = None, *, steps: int = 1
    ) -> None:
        super().__init__(problem, fields)
        self.steps = steps
        self._call, self._free = bind(problem, *self.fields)

    def step(self) -> None:
        for _ in range(self.steps):
            self._call()

    def close(self) -> None:
        self.problem.session.synchronize()
        del self._call, self.fields
        self._free()


class InWindows(Called):
    """The same on arrays in windows."""

    def __init__(self, problem: Spread, bind: Bind, *, steps: int = 1) -> None:
        self._windows = problem.arrays(problem.session.node.allocate_each)
        super().__init__(problem, bind, [each.array for each in self._windows], steps=steps)

    def close(self) -> None:
        super().close()
        for window in reversed(self._windows):
            window.close()


def _own(problem: Spread, source: Any, target: Any) -> tuple[Call, Call]:
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


def _typed(problem: Spread, source: Any, target: Any) -> tuple[Call, Call]:
    """Bind `MPI_Alltoallw` with a datatype of the cells for and from each rank."""
    made, ends = [], []
    for array, cells in zip((source, target), problem.by_rank(), strict=True):
        views = [array[each] for each in cells]
        types = [mpi.datatype(view) for view in views]
        places = [address_of(view) - address_of(array) if view.size else 0 for view in views]
        made += types
        ends.append([_memory(array), [1] * len(views), places, types])
    return partial(problem.comm.Alltoallw, *ends), partial(mpi.free, made)


def _packed(problem: Spread, source: Any, target: Any) -> tuple[Call, Call]:
    """Bind `MPI_Alltoallv` with copies that pack and unpack around it; own cells are copied."""
    session, size = problem.session, problem.comm.size
    words = max(sum(problem.slots()), 1)
    held = out, into = [session.node.xp.zeros(words, "u8") for _ in range(2)]
    pack, unpack = problem.packing((source, target), out, into)
    ends = []
    for buffer, parts in zip((out, into), problem.parts(out, into), strict=True):
        counts, places = [0] * size, [0] * size
        for side, part in zip(problem.sides, parts, strict=True):
            peer = side.to if buffer is out else side.source
            counts[peer] = int(part.size)
            places[peer] = (address_of(part) - address_of(buffer)) // ITEM_NBYTES
        ends.append([_memory(buffer), (counts, places), MPI.UINT64_T])

    def redistribute() -> None:
        pack()
        session.synchronize()
        problem.comm.Alltoallv(*ends)  # which has addresses only
        unpack()

    return redistribute, held.clear


def _gather(problem: Spread, source: Any, target: Any) -> tuple[Call, Call]:
    ends = [[_memory(array), MPI.BYTE] for array in (source, target)]
    return partial(problem.comm.Allgather, *ends), do_nothing


def _memory(array: Any) -> MPI.buffer:
    return MPI.buffer.fromaddress(address_of(array), int(array.nbytes))


def _on_gpu(bind: Bind, problem: Spread, source: Any, target: Any) -> tuple[Call, Call]:
    """Bind a call of an MPI that takes pointers to GPU memory, or to that of the host."""
    call, free = bind(problem, source, target)
    return problem.session.synchronized(call), free


def _staged(bind: Bind, problem: Spread, source: Any, target: Any) -> tuple[Call, Call]:
    """Bind the same between copies from and to pinned memory."""
    return through_host(problem.session, partial(bind, problem), source, target)


def _then_permuted(bind: Bind, problem: Spread, source: Any, target: Any) -> tuple[Call, Call]:
    """Bind a call that keeps the order of the axes, and a copy that changes it where it must.

    Datatypes of permuted cells are slower than both.
    """
    if problem.permute is None:
        return bind(problem, source, target)
    ordered = problem.session.node.xp.zeros(problem.cells(target).shape, problem.dtype)
    call, free = bind(problem, source, ordered)
    permute = copy_all(problem.session, [(problem.cells(target), ordered)])

    def redistribute() -> None:
        call()
        permute()

    return redistribute, free


class _InLibrary(Called):
    """The gather of a library, between arrays in its memory."""

    def __init__(self, library: Library, problem: Spread, *, steps: int = 1) -> None:
        self._library = library
        self._memory = problem.arrays(
            lambda shape, dtype: library.empty(prod(shape)).view(dtype).reshape(shape)
        )

        def bind(_: Spread, source: Any, target: Any) -> tuple[Call, Call]:
            return library.bind_gather(source.view("u8"), target.view("u8")), do_nothing

        super().__init__(problem, bind, self._memory, steps=steps)

    def close(self) -> None:
        super().close()
        for array in reversed(self._memory):
            self._library.free(array.view("u8"))


def _enter_transposes(comparison: Comparison, problem: Spread) -> None:
    staged = partial(_then_permuted, partial(_staged, _typed))
    by_types = partial(_then_permuted, _typed)
    add_baselines(
        comparison,
        problem,
        {
            "staged": Staged,
            "staged alltoallw": partial(Called, bind=staged),
            "alltoallw": partial(Called, bind=by_types),
            "alltoallv": partial(Called, bind=_packed),
            "sendrecv": mpi.Sendrecv,
            "isend": mpi.Isend,
        },
    )
    if comparison.includes("mpi"):
        _, refusal = open_library(problem.session, CudaMpi)
        binds: dict[str, Bind] = {
            "mpi alltoallw": partial(_on_gpu, by_types),
            "mpi alltoallv": _packed,
        }
        for name, bind in binds.items():
            make = partial(Called, problem, bind)
            comparison.add(name, make, kind=BASELINE, unfit=refusal)


def _enter_gathers(comparison: Comparison, problem: Spread) -> None:
    gather = partial(Called, problem)
    comparison.add_baselines("allgather", {"allgather": partial(gather, _gather)})
    comparison.add_baselines("staged", {"staged": partial(gather, partial(_staged, _gather))})
    for name, library, arguments, in_graphs in collectives(comparison):
        make, graphs = partial(_InLibrary, library, problem), IN_GRAPHS if in_graphs else ()
        add_with_graphs(comparison, name, make, graphs, **arguments)

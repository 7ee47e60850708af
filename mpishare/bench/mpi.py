"""MPI baselines on host memory: messages, neighborhood collectives and derived datatypes.

Faces whose cells are contiguous are sent from where they are: packing would only make the baseline
slower. All fields of a side go in one message, unless they are large and need no packing.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpishare.bench.grid import Exchange, Grid, Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.bench.grid import Side, Slices


Copies = tuple[tuple[Any, Any], ...]
"""Pairs of target and source, as views that were made once."""


#: From this size on the fields of a side are sent one by one if that saves the packing.
_LARGE_NBYTES = 4 << 10


def copy(copies: Copies) -> None:
    """Pack or unpack."""
    for target, source in copies:
        np.copyto(target, source)


@dataclass(frozen=True)
class Message:
    """One message through a side and its counterpart from the other side."""

    send: tuple[Any, int, int]  # the arguments of Isend and Irecv: buffer, rank, tag
    receive: tuple[Any, int, int]
    packs: Copies = ()  # the copies before and after
    unpacks: Copies = ()


def messages(problem: Problem, side: Side, fields: Sequence[Any]) -> list[Message]:
    """Return the messages of a side, in their strongest form."""
    to, source, tag = side.to, side.source, side.number
    out, into = problem.leaving(side, fields), problem.arriving(side, fields)
    few = len(out) == 1 or out[0].nbytes >= _LARGE_NBYTES
    if few and all(view.flags.c_contiguous for view in (*out, *into)):
        return [
            Message((one, to, tag), (other, source, tag))
            for one, other in zip(out, into, strict=True)
        ]
    sent, received = (np.zeros((len(out), *out[0].shape)) for _ in range(2))
    packs = tuple(zip(sent, out, strict=True))
    unpacks = tuple(zip(into, received, strict=True))
    return [Message((sent, to, tag), (received, source, tag), packs, unpacks)]


class Sendrecv(Exchange[Problem]):
    """Axis by axis, two Sendrecv each."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._phases = []
        for pair in problem.sides_by_axis():
            of_axis = [each for side in pair for each in messages(problem, side, self.fields)]
            packs = tuple(one for each in of_axis for one in each.packs)
            unpacks = tuple(one for each in of_axis for one in each.unpacks)
            self._phases.append((packs, [(*one.send, *one.receive) for one in of_axis], unpacks))

    def step(self) -> None:
        sendrecv = self.problem.comm.Sendrecv
        for packs, arguments, unpacks in self._phases:
            copy(packs)
            for each in arguments:
                sendrecv(*each)
            copy(unpacks)


class Isend(Exchange[Problem]):
    """All sides at once: Irecv, then pack and Isend one after the other, Waitall, unpack."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.comm = problem.comm
        self.all = [each for side in problem.sides for each in messages(problem, side, self.fields)]
        self.packs = tuple(one for each in self.all for one in each.packs)
        self.unpacks = tuple(one for each in self.all for one in each.unpacks)

    def step(self) -> None:
        irecv, isend = self.comm.Irecv, self.comm.Isend
        requests = [irecv(*one.receive) for one in self.all]
        for one in self.all:
            copy(one.packs)
            requests.append(isend(*one.send))
        MPI.Request.Waitall(requests)
        copy(self.unpacks)


class Persistent(Isend):
    """The same with persistent requests."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._receives = [self.comm.Recv_init(*one.receive) for one in self.all]
        self._sends = [self.comm.Send_init(*one.send) for one in self.all]
        self._requests = [*self._receives, *self._sends]

    def step(self) -> None:
        MPI.Prequest.Startall(self._receives)
        copy(self.packs)
        MPI.Prequest.Startall(self._sends)
        MPI.Request.Waitall(self._requests)
        copy(self.unpacks)

    def close(self) -> None:
        for request in self._requests:
            request.Free()


class Waitany(Persistent):
    """The same, each message unpacked as it comes in, while it is still in the cache."""

    def step(self) -> None:
        receives, waitany = self._receives, MPI.Request.Waitany
        MPI.Prequest.Startall(receives)
        for one, send in zip(self.all, self._sends, strict=True):
            copy(one.packs)
            send.Start()
        for _ in receives:
            copy(self.all[waitany(receives)].unpacks)
        MPI.Request.Waitall(self._sends)


class _Neighborhood:
    """A neighborhood collective over the sides of a grid, persistent where MPI has that.

    Collective. A cart has no neighbors across edges, and where two ranks meet at several sides MPI
    libraries disagree on the order of their messages. In a distributed graph the edges of a pair
    are ordered: the k-th that one rank sends on is the k-th that the other one receives on, and
    both list them as the sender does.
    """

    def __init__(self, grid: Grid, name: str, sent: Any, received: Any) -> None:
        sources, to = [side.source for side in grid.sides], [side.to for side in grid.sides]
        # Not from the cart: Open MPI takes a graph made from one for a cart still.
        self._graph = grid.session.comm.Create_dist_graph_adjacent(sources, to, reorder=False)
        self._request: MPI.Prequest | None = None
        self.run: Callable[[], None] = partial(getattr(self._graph, name), sent, received)
        # New in MPI 4, and not in every library.
        with suppress(NotImplementedError):
            self._request = getattr(self._graph, f"{name}_init")(sent, received)
            self.run = self._run_again

    def _run_again(self) -> None:
        if self._request is not None:
            self._request.Start()
            self._request.Wait()

    def close(self) -> None:
        if self._request is not None:
            self._request.Free()
        self._graph.Free()


class NeighborPacked(Exchange[Grid]):
    """Pack all sides, Neighbor_alltoallv, unpack."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        counts = [grid.count * grid.size(side) for side in grid.sides]
        out, into = np.zeros(sum(counts)), np.zeros(sum(counts))
        packs, unpacks, first = [], [], 0
        for side in grid.sides:
            for field in self.fields:
                source, target = field[side.out], field[side.into]
                last = first + source.size
                packs.append((out[first:last].reshape(source.shape), source))
                unpacks.append((target, into[first:last].reshape(target.shape)))
                first = last
        self._packs, self._unpacks = tuple(packs), tuple(unpacks)
        self._collective = _Neighborhood(grid, "Neighbor_alltoallv", (out, counts), (into, counts))

    def step(self) -> None:
        copy(self._packs)
        self._collective.run()
        copy(self._unpacks)

    def close(self) -> None:
        self._collective.close()


class _Typed(Exchange[Grid]):
    """Leaves packing to MPI: a datatype for what leaves through each side, one for what comes in.

    With one field they are relative to its first byte, with several they are absolute addresses.
    """

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self.buffer: Any = self.fields[0] if grid.count == 1 else MPI.BOTTOM
        self.out = [self._type(side.out) for side in grid.sides]
        self.into = [self._type(side.into) for side in grid.sides]

    def close(self) -> None:
        for datatype in (*self.out, *self.into):
            datatype.Free()

    def _type(self, cells: Slices) -> MPI.Datatype:
        shape = self.problem.shape
        spans = [range(*span.indices(extent)) for span, extent in zip(cells, shape, strict=True)]
        extents, starts = [len(span) for span in spans], [span.start for span in spans]
        box = MPI.DOUBLE.Create_subarray(shape, extents, starts)
        if self.problem.count == 1:
            return box.Commit()
        addresses = [MPI.Get_address(field) for field in self.fields]
        every = MPI.Datatype.Create_struct([1] * len(addresses), addresses, [box] * len(addresses))
        box.Free()
        return every.Commit()


class Datatypes(_Typed):
    """Persistent requests of datatypes: Startall and Waitall."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        comm, buffer = grid.comm, self.buffer
        self._requests: list[MPI.Prequest] = [
            comm.Recv_init([buffer, 1, datatype], side.source, side.number)
            for datatype, side in zip(self.into, grid.sides, strict=True)
        ]
        self._requests += [
            comm.Send_init([buffer, 1, datatype], side.to, side.number)
            for datatype, side in zip(self.out, grid.sides, strict=True)
        ]

    def step(self) -> None:
        MPI.Prequest.Startall(self._requests)
        MPI.Request.Waitall(self._requests)

    def close(self) -> None:
        for request in self._requests:
            request.Free()
        super().close()


class NeighborTypes(_Typed):
    """Neighbor_alltoallw."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        ones, zeros = [1] * len(grid.sides), [0] * len(grid.sides)
        sent = [self.buffer, ones, zeros, self.out]
        received = [self.buffer, ones, zeros, self.into]
        self._collective = _Neighborhood(grid, "Neighbor_alltoallw", sent, received)

    def step(self) -> None:
        self._collective.run()

    def close(self) -> None:
        self._collective.close()
        super().close()

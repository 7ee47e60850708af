"""MPI baselines on host memory: messages, neighborhood collectives and derived datatypes.

Faces whose cells are contiguous are sent from where they are: packing would only make the baseline
slower. All fields of a side go in one message, unless they are large and need no packing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpishare.bench.copies import Copies, copy
from mpishare.bench.grid import Exchange, Grid, Problem, Side, Slices, cut

#: From this size on the fields of a side are sent one by one if that saves the packing.
_LARGE_NBYTES = 4 << 10


class Message(NamedTuple):
    """One message through a side and its counterpart from the other side."""

    send: tuple[Any, int, int]  # the arguments of Isend and Irecv: buffer, rank, tag
    receive: tuple[Any, int, int]
    packs: Copies = ()  # the copies before and after
    unpacks: Copies = ()


def messages(problem: Problem, sides: Sequence[Side], fields: Sequence[Any]) -> list[Message]:
    """Return the messages of these sides, in their strongest form."""
    found = []
    for side in sides:
        out, into = problem.leaving(side, fields), problem.arriving(side, fields)
        is_whole = all(view.flags.c_contiguous for view in (*out, *into))
        if is_whole and out[0].nbytes >= _LARGE_NBYTES:
            found += [_message([one], [other], side) for one, other in zip(out, into, strict=True)]
        else:
            found.append(_message(out, into, side))
    return found


def _message(out: Sequence[Any], into: Sequence[Any], side: Side) -> Message:
    """Return one message of all these views."""
    (sent, packs), (received, copies) = _packed(out), _packed(into)
    unpacks = [(view, place) for place, view in copies]
    to, source = (sent, side.to, side.number), (received, side.source, side.number)
    return Message(to, source, packs, unpacks)


def _packed(views: Sequence[Any]) -> tuple[Any, Copies]:
    """Return the memory of a message, and the copies of views into it: none if it is the view."""
    if len(views) == 1 and views[0].flags.c_contiguous:
        return views[0], ()
    memory = np.zeros((len(views), *views[0].shape), views[0].dtype)
    return memory, [*zip(memory, views, strict=True)]


def free(made: Sequence[MPI.Request | MPI.Datatype]) -> None:
    for each in made:
        each.Free()


def datatype(view: Any) -> MPI.Datatype:
    """Return the datatype of the words of a view, in the order of its axes."""
    axes: list[tuple[int, int]] = []
    for n, step in zip(view.shape, view.strides, strict=True):
        if axes and axes[-1][1] == n * step:
            axes[-1] = axes[-1][0] * n, step
        else:
            axes.append((n, step))
    found = MPI.BYTE.Create_contiguous(view.itemsize)
    for n, step in reversed(axes):
        inner = found
        is_dense = step == view.itemsize
        found = inner.Create_contiguous(n) if is_dense else inner.Create_hvector(n, 1, step)
        inner.Free()
    return found.Commit()


def copies_of(of: Sequence[Message]) -> tuple[Copies, Copies]:
    """Return all copies before, and all copies after these messages."""
    packs = tuple(one for each in of for one in each.packs)
    return packs, tuple(one for each in of for one in each.unpacks)


class Sendrecv(Exchange[Problem]):
    """Axis by axis, two Sendrecv each."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._own = problem.own(self.fields)
        self._phases = []
        for pair in problem.sides_by_axis():
            of_axis = messages(problem, pair, self.fields)
            arguments = [(*one.send, *one.receive) for one in of_axis]
            self._phases.append((arguments, *copies_of(of_axis)))

    def step(self) -> None:
        sendrecv = self.problem.comm.Sendrecv
        copy(self._own)
        for arguments, packs, unpacks in self._phases:
            copy(packs)
            for each in arguments:
                sendrecv(*each)
            copy(unpacks)


class Isend(Exchange[Problem]):
    """All sides at once: Irecv, then pack and Isend one after the other, Waitall, unpack."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.comm = problem.comm
        self.all = messages(problem, problem.sides, self.fields)
        self.packs, self.unpacks = copies_of(self.all)
        self.own = problem.own(self.fields)

    def step(self) -> None:
        irecv, isend = self.comm.Irecv, self.comm.Isend
        requests = [irecv(*one.receive) for one in self.all]
        for one in self.all:
            copy(one.packs)
            requests.append(isend(*one.send))
        copy(self.own)
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
        copy(self.own)
        MPI.Request.Waitall(self._requests)
        copy(self.unpacks)

    def close(self) -> None:
        free(self._requests)


class Waitany(Persistent):
    """The same, each message unpacked as it comes in, while it is still in the cache."""

    def step(self) -> None:
        receives, waitany = self._receives, MPI.Request.Waitany
        MPI.Prequest.Startall(receives)
        for one, send in zip(self.all, self._sends, strict=True):
            copy(one.packs)
            send.Start()
        copy(self.own)
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
        self._made: list[MPI.Request] = []
        self.run: Callable[[], object] = partial(getattr(self._graph, name), sent, received)
        # New in MPI 4, and not in every library.
        with suppress(NotImplementedError):
            request = getattr(self._graph, f"{name}_init")(sent, received)
            self._made.append(request)
            self.run = lambda: (request.Start(), request.Wait())

    def close(self) -> None:
        free(self._made)
        self._graph.Free()


class NeighborPacked(Exchange[Grid]):
    """Pack all sides, Neighbor_alltoallv, unpack."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        counts = [grid.count * grid.size(side) for side in grid.sides]
        out, into = np.zeros(sum(counts)), np.zeros(sum(counts))
        sent, received = grid.faces(self.fields)
        self._packs = tuple(zip(cut(out, sent), sent, strict=True))
        self._unpacks = tuple(zip(received, cut(into, received), strict=True))
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
        free([*self.out, *self.into])

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
        receive, send, buffer = grid.comm.Recv_init, grid.comm.Send_init, self.buffer
        self._requests: list[MPI.Prequest] = [
            *(receive([buffer, 1, self.into[i]], s.source, i) for i, s in enumerate(grid.sides)),
            *(send([buffer, 1, self.out[i]], s.to, i) for i, s in enumerate(grid.sides)),
        ]

    def step(self) -> None:
        MPI.Prequest.Startall(self._requests)
        MPI.Request.Waitall(self._requests)

    def close(self) -> None:
        free(self._requests)
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

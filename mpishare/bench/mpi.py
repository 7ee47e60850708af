"""MPI baselines on host memory: messages, neighborhood collectives and derived datatypes.

Faces whose cells are contiguous are sent from where they are: packing would only make the baseline
slower. All fields of a side go in one message, unless they are large and need no packing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpishare.bench.copies import Copies, copy
from mpishare.bench.grid import Grid, Problem, Side, Slices
from mpishare.bench.session import Bound, do_nothing, in_turn

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
    (sent, packs), (received, copies) = _packed(out), _packed(into)
    unpacks = [(view, slot) for slot, view in copies]
    to, source = (sent, side.to, side.number), (received, side.source, side.number)
    return Message(to, source, packs, unpacks)


def _packed(views: Sequence[Any]) -> tuple[Any, Copies]:
    """Return the memory of a message, and the copies of views into it: none if it is the view."""
    if len(views) == 1 and views[0].flags.c_contiguous:
        return views[0], ()
    memory = np.zeros((len(views), *views[0].shape), views[0].dtype)
    return memory, [*zip(memory, views, strict=True)]


def free(made: Sequence[MPI.Request | MPI.Datatype | MPI.Comm]) -> None:
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


def sendrecv(problem: Problem, *fields: Any) -> Bound:
    """Bind axis by axis, two Sendrecv each."""
    call, own, phases = problem.comm.Sendrecv, problem.own(fields), []
    for pair in problem.sides_by_axis():
        of_axis = messages(problem, pair, fields)
        arguments = [(*one.send, *one.receive) for one in of_axis]
        phases.append((arguments, *copies_of(of_axis)))

    def exchange() -> None:
        copy(own)
        for arguments, packs, unpacks in phases:
            copy(packs)
            for each in arguments:
                call(*each)
            copy(unpacks)

    return exchange, do_nothing


def isend(problem: Problem, *fields: Any) -> Bound:
    """Bind all sides at once: Irecv, then pack and Isend one after the other, Waitall, unpack."""
    call, irecv, waitall = problem.comm.Isend, problem.comm.Irecv, MPI.Request.Waitall
    every, own = messages(problem, problem.sides, fields), problem.own(fields)
    _, unpacks = copies_of(every)

    def exchange() -> None:
        requests = [irecv(*one.receive) for one in every]
        for one in every:
            copy(one.packs)
            requests.append(call(*one.send))
        copy(own)
        waitall(requests)
        copy(unpacks)

    return exchange, do_nothing


def persistent(problem: Problem, *fields: Any) -> Bound:
    """Bind the same with persistent requests."""
    every, own = messages(problem, problem.sides, fields), problem.own(fields)
    packs, unpacks = copies_of(every)
    receives, sends = requests(problem.comm, every)
    both, startall, waitall = [*receives, *sends], MPI.Prequest.Startall, MPI.Request.Waitall

    def exchange() -> None:
        startall(receives)
        copy(packs)
        startall(sends)
        copy(own)
        waitall(both)
        copy(unpacks)

    return exchange, partial(free, both)


def requests(
    comm: MPI.Intracomm, of: Sequence[Message]
) -> tuple[list[MPI.Prequest], list[MPI.Prequest]]:
    """Return persistent requests that receive and that send these messages."""
    receives = [comm.Recv_init(*one.receive) for one in of]
    return receives, [comm.Send_init(*one.send) for one in of]


def _neighborhood(grid: Grid, name: str, sent: Any, received: Any) -> Bound:
    """Bind a neighborhood collective over the sides of a grid, persistent where MPI has that.

    Collective. A cart has no neighbors across edges, and where two ranks meet at several sides MPI
    libraries disagree on the order of their messages. In a distributed graph the edges of a pair
    are ordered: the k-th that one rank sends on is the k-th that the other one receives on, and
    both list them as the sender does.
    """
    sources, to = [side.source for side in grid.sides], [side.to for side in grid.sides]
    # Not from the cart: Open MPI takes a graph made from one for a cart still.
    graph = grid.session.comm.Create_dist_graph_adjacent(sources, to, reorder=False)
    # New in MPI 4, and not in every library.
    with suppress(NotImplementedError):
        request = getattr(graph, f"{name}_init")(sent, received)
        return in_turn(request.Start, request.Wait), partial(free, [request, graph])
    return partial(getattr(graph, name), sent, received), graph.Free


def neighborhood(grid: Grid, *fields: Any) -> Bound:
    """Bind Neighbor_alltoallw, which leaves packing to MPI."""
    buffer, out, into = _types(grid, fields)
    ones, zeros = [1] * len(grid.sides), [0] * len(grid.sides)
    ends = [buffer, ones, zeros, out], [buffer, ones, zeros, into]
    run, close = _neighborhood(grid, "Neighbor_alltoallw", *ends)
    return run, in_turn(close, partial(free, [*out, *into]))


def datatypes(grid: Grid, *fields: Any) -> Bound:
    """Bind persistent requests of datatypes: Startall and Waitall."""
    buffer, out, into = _types(grid, fields)
    every = [
        Message(([buffer, 1, sent], side.to, tag), ([buffer, 1, got], side.source, tag))
        for tag, (side, sent, got) in enumerate(zip(grid.sides, out, into, strict=True))
    ]
    receives, sends = requests(grid.comm, every)
    both, startall, waitall = [*receives, *sends], MPI.Prequest.Startall, MPI.Request.Waitall

    def exchange() -> None:
        startall(both)
        waitall(both)

    return exchange, partial(free, [*both, *out, *into])


def _types(grid: Grid, fields: Sequence[Any]) -> tuple[Any, list[MPI.Datatype], list[MPI.Datatype]]:
    """Return a buffer, and by side the datatypes of what leaves from it and of what comes in.

    With one field they are relative to its first byte, with several they are absolute addresses.
    """
    addresses = [MPI.Get_address(field) for field in fields] if len(fields) > 1 else []

    def type_of(cells: Slices) -> MPI.Datatype:
        starts = [span.start or 0 for span in cells]
        box = MPI.DOUBLE.Create_subarray(grid.shape, fields[0][cells].shape, starts)
        if not addresses:
            return box.Commit()
        ones, boxes = [1] * len(addresses), [box] * len(addresses)
        every = MPI.Datatype.Create_struct(ones, addresses, boxes)
        box.Free()
        return every.Commit()

    out = [type_of(side.out) for side in grid.sides]
    return (MPI.BOTTOM if addresses else fields[0]), out, [type_of(s.into) for s in grid.sides]

"""The rivals of the halo cases on the host: packed buffers and MPI messages.

A face whose cells lie one after the other is sent from where it lies: packing it would only make
the rival slower. All fields of a side go in one message, unless they are large and need no packing.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpishare.bench.cases.halo_arms import HaloArm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.bench.cases.halo_grid import Grid, Side

Copies = tuple[tuple[Any, Any], ...]
"""Where to and where from, as views that were made once."""

#: From here on the fields of a side are sent one by one if that saves the packing.
_LARGE_NBYTES = 4 << 10


def copy(copies: Copies) -> None:
    """Pack or unpack. Local."""
    for target, source in copies:
        np.copyto(target, source)


@dataclass(frozen=True)
class Message:
    """What goes through one side, and comes in from the other one, in a step.

    Attributes
    ----------
    to, source, tag : int
        Ranks in the cart, and what both ends call the side.
    out, into : numpy.ndarray
        What is sent, where it is received.
    packs, unpacks : tuple of pair of numpy.ndarray
        The copies before and after.
    """

    to: int
    source: int
    tag: int
    out: Any
    into: Any
    packs: Copies
    unpacks: Copies


def messages(fields: Sequence[Any], side: Side) -> list[Message]:
    """Return the messages of a side, each in its strongest form. Local."""
    out = [field[side.source] for field in fields]
    into = [field[side.target] for field in fields]
    few = len(fields) == 1 or out[0].nbytes >= _LARGE_NBYTES
    if few and all(view.flags.c_contiguous for view in (*out, *into)):
        return [
            Message(side.neighbor, side.opposite, side.number, one, other, (), ())
            for one, other in zip(out, into, strict=True)
        ]
    sent, received = (np.zeros((len(fields), *out[0].shape)) for _ in range(2))
    packs = tuple(zip(sent, out, strict=True))
    unpacks = tuple(zip(into, received, strict=True))
    return [Message(side.neighbor, side.opposite, side.number, sent, received, packs, unpacks)]


class Sendrecv(HaloArm):
    """Axis by axis, two Sendrecv each."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid, grid.fields)
        self._cart = grid.cart
        phases = []
        for pair in grid.phases():
            of_axis = [each for side in pair for each in messages(self.fields, side)]
            packs = tuple(one for each in of_axis for one in each.packs)
            unpacks = tuple(one for each in of_axis for one in each.unpacks)
            phases.append((packs, of_axis, unpacks))
        self._phases = phases

    def step(self) -> None:
        """Exchange the ghosts."""
        sendrecv = self._cart.Sendrecv
        for packs, of_axis, unpacks in self._phases:
            copy(packs)
            for one in of_axis:
                sendrecv(one.out, one.to, one.tag, one.into, one.source, one.tag)
            copy(unpacks)


class Isend(HaloArm):
    """All sides at once: Irecv, then pack and Isend one after the other, Waitall, unpack."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid, grid.fields)
        self.cart = grid.cart
        self.all = [each for side in grid.sides for each in messages(self.fields, side)]
        self.packs = tuple(one for each in self.all for one in each.packs)
        self.unpacks = tuple(one for each in self.all for one in each.unpacks)

    def step(self) -> None:
        """Exchange the ghosts."""
        irecv, isend = self.cart.Irecv, self.cart.Isend
        requests = [irecv(one.into, one.source, one.tag) for one in self.all]
        for one in self.all:
            copy(one.packs)
            requests.append(isend(one.out, one.to, one.tag))
        MPI.Request.Waitall(requests)
        copy(self.unpacks)


class Persistent(Isend):
    """The same with requests that are made once."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self._receives = [self.cart.Recv_init(one.into, one.source, one.tag) for one in self.all]
        self._sends = [self.cart.Send_init(one.out, one.to, one.tag) for one in self.all]
        self._requests = [*self._receives, *self._sends]

    def step(self) -> None:
        """Exchange the ghosts."""
        MPI.Prequest.Startall(self._receives)
        copy(self.packs)
        MPI.Prequest.Startall(self._sends)
        MPI.Request.Waitall(self._requests)
        copy(self.unpacks)

    def close(self) -> None:
        """Free the requests."""
        for request in self._requests:
            request.Free()


class Waitany(Persistent):
    """The same, each message unpacked as it comes in, while it is in the cache still."""

    def step(self) -> None:
        """Exchange the ghosts."""
        receives, waitany = self._receives, MPI.Request.Waitany
        MPI.Prequest.Startall(receives)
        for one, send in zip(self.all, self._sends, strict=True):
            copy(one.packs)
            send.Start()
        for _ in receives:
            copy(self.all[waitany(receives)].unpacks)
        MPI.Request.Waitall(self._sends)


class Neighborhood:
    """A neighborhood collective over the sides of a grid, persistent where MPI has that.

    Collective. A cart has no neighbors across edges, and where two ranks meet on several sides MPI
    libraries do not agree on which of its messages is whose. In a graph the links of a pair are in
    order: the k-th that one rank sends on is the k-th that the other one receives on, and both list
    them as the sender does.

    Parameters
    ----------
    grid : Grid
        Whose sides are the links.
    name : str
        The collective.
    sent, received : sequence
        Its buffers.
    """

    def __init__(self, grid: Grid, name: str, sent: Any, received: Any) -> None:
        sources = [side.opposite for side in grid.sides]
        to = [side.neighbor for side in grid.sides]
        comm = grid.session.comm
        # Not from the cart: Open MPI takes a graph made from one for a cart still.
        self._graph = comm.Create_dist_graph_adjacent(sources, to, reorder=False)
        self._request: MPI.Prequest | None = None
        self.run: Callable[[], None] = partial(getattr(self._graph, name), sent, received)
        # MPI 4 has it, and not every library has that.
        with suppress(NotImplementedError):
            self._request = getattr(self._graph, f"{name}_init")(sent, received)
            self.run = self._run_again

    def _run_again(self) -> None:
        if self._request is not None:
            self._request.Start()
            self._request.Wait()

    def close(self) -> None:
        """Free the request and the graph."""
        if self._request is not None:
            self._request.Free()
        self._graph.Free()


class NeighborPacked(HaloArm):
    """Pack all sides, Neighbor_alltoallv, unpack."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid, grid.fields)
        counts = [grid.count * grid.size(side) for side in grid.sides]
        out, into = np.zeros(sum(counts)), np.zeros(sum(counts))
        packs, unpacks, first = [], [], 0
        for side in grid.sides:
            for field in self.fields:
                shape, last = field[side.source].shape, first + grid.size(side)
                packs.append((out[first:last].reshape(shape), field[side.source]))
                unpacks.append((field[side.target], into[first:last].reshape(shape)))
                first = last
        self._packs, self._unpacks = tuple(packs), tuple(unpacks)
        self._links = Neighborhood(grid, "Neighbor_alltoallv", (out, counts), (into, counts))

    def step(self) -> None:
        """Exchange the ghosts."""
        copy(self._packs)
        self._links.run()
        copy(self._unpacks)

    def close(self) -> None:
        """Free what MPI has of it."""
        self._links.close()

"""Halo exchanges as they are written without mpishare: through the host, by MPI messages.

All have the methods and the boxes of `mpishare.HaloExchange`, for one ghost cell on each side of
every axis and fields of one shape and dtype, NumPy's or CuPy's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Box = tuple[slice, ...]
    Array = Any  # numpy.ndarray or cupy.ndarray


@dataclass(frozen=True)
class Face:
    """What one rank sends one way along an axis, and what it gets from the opposite side."""

    dest: int
    source: int
    sent: Box
    ghosts: Box
    tag: int  # two ranks may be each other's neighbor on both sides


def faces(cart: MPI.Cartcomm, ndim: int, *, corners: bool) -> list[list[Face]]:
    """Return the faces in phases: those of a phase may travel at the same time.

    With corners an axis is a phase, and its faces have the ghosts of the axes before, which have
    arrived by then: so a corner comes by way of two faces, and needs no message.
    """
    phases: list[list[Face]] = [] if corners else [[]]
    first, last = slice(1, 2), slice(-2, -1)
    low_ghost, high_ghost = slice(0, 1), slice(-1, None)
    for axis in range(ndim):
        low, high = cart.Shift(axis, 1)

        def across(part: slice, axis: int = axis) -> Box:
            whole = slice(None) if corners else slice(1, -1)
            return (whole,) * axis + (part,) + (slice(1, -1),) * (ndim - axis - 1)

        if corners:
            phases.append([])
        phases[-1] += [
            Face(high, low, across(last), across(low_ghost), 2 * axis),
            Face(low, high, across(first), across(high_ghost), 2 * axis + 1),
        ]
    return phases


class Staged:
    """What all have: their fields, their faces, and the boxes of owned cells."""

    def __init__(
        self, cart: MPI.Cartcomm, fields: Array | Sequence[Array], xp: Any, *, corners: bool = False
    ) -> None:
        self.cart, self.xp = cart, xp
        self.fields: tuple[Array, ...] = (
            tuple(fields) if isinstance(fields, list | tuple) else (fields,)
        )
        shape = self.fields[0].shape
        self.phases = faces(cart, len(shape), corners=corners)
        self.owned: Box = tuple(slice(1, n - 1) for n in shape)
        inner, shell = list(self.owned), []
        for axis, n in enumerate(shape):
            low, high = (rank != MPI.PROC_NULL for rank in cart.Shift(axis, 1))
            begin, end = 1 + low, max(1 + low, n - 1 - high)
            for part in (slice(1, begin), slice(end, n - 1)):
                if part.start < part.stop:
                    shell.append((*inner[:axis], part, *self.owned[axis + 1 :]))
            inner[axis] = slice(begin, end)
        self.interior: Box = tuple(inner)
        self.shell: tuple[Box, ...] = tuple(shell)

    def start(self, *fields: Array) -> None:
        """Begin to send the faces of `fields`, or of those it was made with."""
        raise NotImplementedError

    def wait(self) -> None:
        """Return when the ghosts are there, or will be for what is put on the stream."""
        raise NotImplementedError

    def exchange(self, *fields: Array) -> None:
        """Start and wait."""
        self.start(*fields)
        self.wait()


def to_host(xp: Any, cells: Array) -> np.ndarray:
    """Return a packed copy in host memory."""
    packed = xp.ascontiguousarray(cells)
    # Packed first: CuPy forgets the current stream when it copies out what is not.
    return packed if xp is np else xp.asnumpy(packed)


class Naive(Staged):
    """asnumpy, Sendrecv, asarray: each face by itself, and the host waits for each."""

    def start(self, *fields: Array) -> None:
        """Exchange everything; nothing overlaps."""
        for face in (face for phase in self.phases for face in phase):
            for u in fields or self.fields:
                sent = to_host(self.xp, u[face.sent])
                got = np.empty_like(sent)
                self.cart.Sendrecv(sent, face.dest, face.tag, got, face.source, face.tag)
                if face.source != MPI.PROC_NULL:
                    u[face.ghosts] = self.xp.asarray(got)

    def wait(self) -> None:
        """Do nothing: `start` has waited."""


class Pinned(Staged):
    """Pinned buffers, Isend, Irecv: all faces of a phase in one copy out and one copy in."""

    def __init__(
        self, cart: MPI.Cartcomm, fields: Array | Sequence[Array], xp: Any, *, corners: bool = False
    ) -> None:
        super().__init__(cart, fields, xp, corners=corners)
        self._buffers = [
            (self._buffer(phase, "dest"), self._buffer(phase, "source")) for phase in self.phases
        ]
        self._senders = [self._sender(out, into) for out, into in self._buffers]
        self._started: tuple[Array, ...] = ()
        self._requests: Sequence[MPI.Request] = []

    def _buffer(self, phase: list[Face], end: str) -> Buffer:
        there = [face for face in phase if getattr(face, end) != MPI.PROC_NULL]
        return Buffer(self.xp, self.fields, there)

    def _sender(self, out: Buffer, into: Buffer) -> Callable[[], Sequence[MPI.Request]]:
        """Return what starts the messages of a phase, and returns their requests."""

        def send() -> list[MPI.Request]:
            requests = [self.cart.Irecv(data, face.source, face.tag) for face, _, data in into]
            return requests + [self.cart.Isend(data, face.dest, face.tag) for face, _, data in out]

        return send

    def start(self, *fields: Array) -> None:
        """Send the faces of the first phase: with corners the later ones hang on what arrives."""
        self._started = fields or self.fields
        self._begin(0)

    def wait(self) -> None:
        """Finish the first phase, then go through the others."""
        self._finish(0)
        for phase in range(1, len(self.phases)):
            self._begin(phase)
            self._finish(phase)

    def _begin(self, phase: int) -> None:
        out = self._buffers[phase][0]
        for face, parts, _ in out:
            for u, part in zip(self._started, parts, strict=True):
                part[...] = u[face.sent]
        # The stream is idle after this: what arrived last has been copied from `into` as well.
        out.to_host()
        self._requests = self._senders[phase]()

    def _finish(self, phase: int) -> None:
        MPI.Request.Waitall(self._requests)
        into = self._buffers[phase][1]
        into.to_device()
        for face, parts, _ in into:
            for u, part in zip(self._started, parts, strict=True):
                u[face.ghosts] = part


class Persistent(Pinned):
    """The same with requests that are made once."""

    def _sender(self, out: Buffer, into: Buffer) -> Callable[[], Sequence[MPI.Request]]:
        requests = [self.cart.Recv_init(data, face.source, face.tag) for face, _, data in into]
        requests += [self.cart.Send_init(data, face.dest, face.tag) for face, _, data in out]

        def send() -> list[MPI.Prequest]:
            MPI.Prequest.Startall(requests)
            return requests

        return send


class Neighborhood(Pinned):
    """The same by a neighborhood collective for each phase, persistent where MPI has that."""

    def _sender(self, out: Buffer, into: Buffer) -> Callable[[], Sequence[MPI.Request]]:
        # Of the cart's ranks, and no cart: Open MPI takes a graph made from one for a cart still.
        ranks = MPI.COMM_WORLD.Create_group(self.cart.Get_group())
        # A graph, since the libraries differ in the order of a cart's neighbors that are one rank.
        graph = ranks.Create_dist_graph_adjacent(
            [face.source for face, _, _ in into], [face.dest for face, _, _ in out], reorder=False
        )
        sent, received = ((each.host, [data.size for _, _, data in each]) for each in (out, into))
        try:
            request = graph.Neighbor_alltoallv_init(sent, received)
        except NotImplementedError:  # before MPI 4
            return lambda: [graph.Ineighbor_alltoallv(sent, received)]

        def send() -> list[MPI.Request]:
            request.Start()
            return [request]

        return send


def make(
    form: str,
    cart: MPI.Cartcomm,
    fields: Array | Sequence[Array],
    xp: Any,
    *,
    corners: bool = False,
) -> Staged:
    """Make the exchange of this name. Collective."""
    kinds: dict[str, type[Staged]] = {
        "naive": Naive,
        "pinned": Pinned,
        "persistent": Persistent,
        "neighborhood": Neighborhood,
    }
    return kinds[form](cart, fields, xp, corners=corners)


class Buffer:
    """One piece of pinned memory and its twin on the GPU, cut into faces; on NumPy they are one.

    Iterating gives each face, a part for each field where the arrays live, and all of the face's
    parts as one message on the host.
    """

    def __init__(self, xp: Any, fields: Sequence[Array], there: list[Face]) -> None:
        extents = [fields[0][face.sent].shape for face in there]
        sizes = [len(fields) * int(np.prod(shape)) for shape in extents]
        self._xp = xp
        self.device = xp.empty(sum(sizes), fields[0].dtype)
        self.host = self.device
        if xp is not np and there:
            import cupyx

            self.host = cupyx.empty_pinned(self.device.shape, self.device.dtype)
        self._faces: list[tuple[Face, list[Array], np.ndarray]] = []
        begin = 0
        for face, shape, size in zip(there, extents, sizes, strict=True):
            mine = slice(begin, begin + size)
            parts = self.device[mine].reshape(len(fields), *shape)
            self._faces.append((face, [parts[k] for k in range(len(fields))], self.host[mine]))
            begin += size

    def __iter__(self) -> Iterator[tuple[Face, list[Array], np.ndarray]]:
        return iter(self._faces)

    def to_host(self) -> None:
        """Copy it all out, and wait for it and what is before it on the stream."""
        if self.host is not self.device:
            self.device.get(out=self.host)

    def to_device(self) -> None:
        """Copy it all in, on the stream."""
        if self.host is not self.device:
            self.device.set(self.host, stream=self._xp.cuda.get_current_stream())

"""Halo exchanges as they are written without mpishare: through the host, by MPI messages.

All have the methods of `mpishare.HaloExchange`, with its `owned` and `interior`, for one ghost cell
on each side of every axis and fields of one shape and dtype, one at a call, NumPy's or CuPy's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def faces(cart: MPI.Cartcomm, ndim: int) -> list[Face]:
    """Return the faces of all axes, which may travel at the same time."""
    found: list[Face] = []
    first, last = slice(1, 2), slice(-2, -1)
    low_ghost, high_ghost = slice(0, 1), slice(-1, None)
    for axis in range(ndim):
        low, high = cart.Shift(axis, 1)

        def across(part: slice, axis: int = axis) -> Box:
            return (slice(1, -1),) * axis + (part,) + (slice(1, -1),) * (ndim - axis - 1)

        found += [
            Face(high, low, across(last), across(low_ghost), 2 * axis),
            Face(low, high, across(first), across(high_ghost), 2 * axis + 1),
        ]
    return found


class Staged:
    """What all have: their faces, and the boxes of owned cells."""

    def __init__(self, cart: MPI.Cartcomm, field: Array, xp: Any) -> None:
        self.cart, self.xp, self.field = cart, xp, field
        shape = field.shape
        self.faces = faces(cart, len(shape))
        self.owned: Box = tuple(slice(1, n - 1) for n in shape)
        inner = []
        for axis, n in enumerate(shape):
            low, high = (rank != MPI.PROC_NULL for rank in cart.Shift(axis, 1))
            inner.append(slice(1 + low, max(1 + low, n - 1 - high)))
        self.interior: Box = tuple(inner)

    def start(self, u: Array) -> None:
        """Begin to send the faces of `u`."""
        raise NotImplementedError

    def wait(self) -> None:
        """Return when the ghosts are there, or will be for what is put on the stream."""
        raise NotImplementedError

    def exchange(self, u: Array) -> None:
        """Start and wait."""
        self.start(u)
        self.wait()


def to_host(xp: Any, cells: Array) -> np.ndarray:
    """Return a packed copy in host memory."""
    packed = xp.ascontiguousarray(cells)
    # Packed first: CuPy forgets the current stream when it copies out what is not.
    return packed if xp is np else xp.asnumpy(packed)


class Naive(Staged):
    """asnumpy, Sendrecv, asarray: each face by itself, and the host waits for each."""

    def start(self, u: Array) -> None:
        """Exchange everything; nothing overlaps."""
        for face in self.faces:
            sent = to_host(self.xp, u[face.sent])
            got = np.empty_like(sent)
            self.cart.Sendrecv(sent, face.dest, face.tag, got, face.source, face.tag)
            if face.source != MPI.PROC_NULL:
                u[face.ghosts] = self.xp.asarray(got)

    def wait(self) -> None:
        """Do nothing: `start` has waited."""


class Pinned(Staged):
    """Pinned buffers, Isend, Irecv: all faces in one copy out and one copy in."""

    def __init__(self, cart: MPI.Cartcomm, field: Array, xp: Any) -> None:
        super().__init__(cart, field, xp)
        self._out, self._into = self._buffer("dest"), self._buffer("source")
        self._started: Array = field
        self._requests: list[MPI.Request] = []

    def _buffer(self, end: str) -> Buffer:
        there = [face for face in self.faces if getattr(face, end) != MPI.PROC_NULL]
        return Buffer(self.xp, self.field, there)

    def start(self, u: Array) -> None:
        """Pack the faces, copy them out, and send them."""
        self._started = u
        for face, part, _ in self._out:
            part[...] = u[face.sent]
        # The stream is idle after this: what arrived last has been copied from `into` as well.
        self._out.to_host()
        receive, send = self.cart.Irecv, self.cart.Isend
        self._requests = [receive(data, face.source, face.tag) for face, _, data in self._into]
        self._requests += [send(data, face.dest, face.tag) for face, _, data in self._out]

    def wait(self) -> None:
        """Wait for the messages, copy them in, and unpack them."""
        MPI.Request.Waitall(self._requests)
        self._into.to_device()
        for face, part, _ in self._into:
            self._started[face.ghosts] = part


class Buffer:
    """One piece of pinned memory and its twin on the GPU, cut into faces; on NumPy they are one.

    Iterating gives each face, its cells where the field lives, and its message on the host.
    """

    def __init__(self, xp: Any, field: Array, there: list[Face]) -> None:
        extents = [field[face.sent].shape for face in there]
        sizes = [int(np.prod(shape)) for shape in extents]
        self._xp = xp
        self.device = xp.empty(sum(sizes), field.dtype)
        self.host = self.device
        if xp is not np and there:
            import cupyx

            self.host = cupyx.empty_pinned(self.device.shape, self.device.dtype)
        self._faces: list[tuple[Face, Array, np.ndarray]] = []
        begin = 0
        for face, shape, size in zip(there, extents, sizes, strict=True):
            mine = slice(begin, begin + size)
            self._faces.append((face, self.device[mine].reshape(shape), self.host[mine]))
            begin += size

    def __iter__(self) -> Iterator[tuple[Face, Array, np.ndarray]]:
        return iter(self._faces)

    def to_host(self) -> None:
        """Copy it all out, and wait for it and what is before it on the stream."""
        if self.host is not self.device:
            self.device.get(out=self.host)

    def to_device(self) -> None:
        """Copy it all in, on the stream."""
        if self.host is not self.device:
            self.device.set(self.host, stream=self._xp.cuda.get_current_stream())


FORMS: dict[str, type[Staged]] = {"naive": Naive, "pinned": Pinned}

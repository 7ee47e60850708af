"""The ring's rivals: both faces as MPI messages, from private memory to private memory."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from mpishare.bench.cases.neighbors import LEFT, RIGHT, Ring, RingArm

# cudaMemcpyKind
_TO_DEVICE, _TO_HOST = 1, 2
#: Tags: which way a message travels. Two ranks may be each other's neighbor on both sides.
_LEFTWARD, _RIGHTWARD = 1, 2


class Messages(RingArm):
    """The buffers that MPI sends and receives, and the way of the bytes to and from them.

    On the host backend MPI works on the faces and ghosts themselves. On CUDA it works on pinned
    memory: `stage_out` copies the faces there and waits, `stage_in` copies the ghosts back and
    does not. The pinned ghosts alternate, so that a receive may be posted while the copy of the
    step before still runs.
    """

    def __init__(self, ring: Ring) -> None:
        super().__init__(ring)
        shape = ring.faces.shape
        self.comm = ring.node.comm
        self.half = 0
        self._ghosts: Any = ring.node.xp.zeros(shape, "u8")
        out, into = ring.faces, [self._ghosts, self._ghosts]
        self._staging: _Staging | None = None
        if ring.session.on_cuda:
            self._staging = _Staging(ring, self._ghosts)
            out, into = self._staging.out, self._staging.into
        # Views that a step passes to MPI as they are.
        self.to_left, self.to_right = out[LEFT], out[RIGHT]
        self.from_left = [half[LEFT] for half in into]
        self.from_right = [half[RIGHT] for half in into]

    def ghosts(self) -> Any:
        """Return where the messages of the last step are."""
        return self._ghosts

    def stage_out(self) -> None:
        """Bring both faces to where MPI sends from, and wait until they are there."""
        if self._staging is not None:
            self._staging.copy_out()

    def stage_in(self) -> None:
        """Bring both ghosts from where MPI received them, and let the next step use the others."""
        if self._staging is not None:
            self._staging.copy_in(self.half)
        self.half = 1 - self.half


class _Staging:
    """Pinned memory beside the faces and the ghosts, and one copy each way. CUDA only."""

    def __init__(self, ring: Ring, ghosts: Any) -> None:
        import cupyx

        shape = ring.faces.shape
        self.out: Any = cupyx.zeros_pinned(shape, "u8")
        self.into: Any = [cupyx.zeros_pinned(shape, "u8") for _ in (0, 1)]
        stream = ring.session.stream
        self._memcpy = ring.node.xp.cuda.runtime.memcpyAsync
        self._synchronize = stream.synchronize
        # Everything that a copy is called with, found once.
        nbytes, number = int(ring.faces.nbytes), int(stream.ptr)
        target, source = int(self.out.ctypes.data), int(ring.faces.data.ptr)
        self._copy_out = target, source, nbytes, _TO_HOST, number
        self._copies_in = [
            (int(ghosts.data.ptr), int(half.ctypes.data), nbytes, _TO_DEVICE, number)
            for half in self.into
        ]

    def copy_out(self) -> None:
        """Copy both faces out and wait until they are there."""
        self._memcpy(*self._copy_out)
        self._synchronize()

    def copy_in(self, half: int) -> None:
        """Copy both ghosts in. Stream-ordered."""
        self._memcpy(*self._copies_in[half])


class Isend(Messages):
    """Irecv, Isend and Waitall."""

    def step(self) -> None:
        """Move both faces."""
        comm, ring, half = self.comm, self.ring, self.half
        from_left = comm.Irecv(self.from_left[half], ring.left, _RIGHTWARD)
        from_right = comm.Irecv(self.from_right[half], ring.right, _LEFTWARD)
        self.stage_out()
        to_left = comm.Isend(self.to_left, ring.left, _LEFTWARD)
        to_right = comm.Isend(self.to_right, ring.right, _RIGHTWARD)
        MPI.Request.Waitall([from_left, from_right, to_left, to_right])
        self.stage_in()


class Sendrecv(Messages):
    """Two Sendrecv, one a direction."""

    def step(self) -> None:
        """Move both faces."""
        comm, left, right = self.comm, self.ring.left, self.ring.right
        from_left, from_right = self.from_left[self.half], self.from_right[self.half]
        self.stage_out()
        comm.Sendrecv(self.to_right, right, _RIGHTWARD, from_left, left, _RIGHTWARD)
        comm.Sendrecv(self.to_left, left, _LEFTWARD, from_right, right, _LEFTWARD)
        self.stage_in()


class Persistent(Messages):
    """Persistent requests, made once."""

    def __init__(self, ring: Ring) -> None:
        super().__init__(ring)
        comm = self.comm
        self._sends = [
            comm.Send_init(self.to_left, ring.left, _LEFTWARD),
            comm.Send_init(self.to_right, ring.right, _RIGHTWARD),
        ]
        self._receives = [
            [
                comm.Recv_init(from_left, ring.left, _RIGHTWARD),
                comm.Recv_init(from_right, ring.right, _LEFTWARD),
            ]
            for from_left, from_right in zip(self.from_left, self.from_right, strict=True)
        ]
        self._all = [[*receives, *self._sends] for receives in self._receives]

    def step(self) -> None:
        """Move both faces."""
        half = self.half
        MPI.Prequest.Startall(self._receives[half])
        self.stage_out()
        MPI.Prequest.Startall(self._sends)
        MPI.Request.Waitall(self._all[half])
        self.stage_in()

    def close(self) -> None:
        """Free the requests."""
        for request in (*self._sends, *self._receives[0], *self._receives[1]):
            request.Free()

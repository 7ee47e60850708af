"""The baselines on CUDA that send through the host.

`Staged` is the strongest of them: one kernel packs all sides of all fields, where that is needed,
one copy brings them to pinned memory, and the same back. `Naive` is what most programs do.
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from mpishare.bench.baselines.packing import Packing, side_sizes, split
from mpishare.bench.problems.exchange import Exchange, Problem
from mpishare.bench.problems.grid import Grid

# cudaMemcpyKind
_TO_DEVICE, _TO_HOST = 1, 2


class Staged(Exchange[Problem]):
    """Pack, one copy out, Irecv and Isend, one copy in, unpack.

    The pinned memory that is received into alternates, so that a receive may be posted while the
    copy of the step before still runs.
    """

    def __init__(self, problem: Problem) -> None:
        import cupyx

        super().__init__(problem)
        xp, stream = problem.session.node.xp, problem.session.stream
        sizes = side_sizes(problem, self.fields)
        self._packing: Packing | None = None
        # Held for the copies, which have addresses only.
        self._packed, self._landed = self.fields[0], self.fields[-1]
        if not problem.has_buffers:
            self._packing = Packing(problem, self.fields)
            self._packed, self._landed = (xp.zeros(sum(sizes), "u8") for _ in range(2))
        self.comm = problem.comm
        self._synchronize = stream.synchronize
        self._memcpy = xp.cuda.runtime.memcpyAsync
        self._out = cupyx.zeros_pinned(sum(sizes), "u8")
        self._into = [cupyx.zeros_pinned(sum(sizes), "u8") for _ in range(2)]
        # The arguments of all calls, found once.
        nbytes, handle = int(self._packed.nbytes), int(stream.ptr)
        pinned, source = int(self._out.ctypes.data), int(self._packed.data.ptr)
        self._copy_out = pinned, source, nbytes, _TO_HOST, handle
        self._copies_in = [
            (int(self._landed.data.ptr), int(half.ctypes.data), nbytes, _TO_DEVICE, handle)
            for half in self._into
        ]
        out, halves = split(self._out, sizes), [split(half, sizes) for half in self._into]
        self.sends = [(out[side.number], side.to, side.number) for side in problem.sides]
        self.receives = [
            [(half[side.number], side.source, side.number) for side in problem.sides]
            for half in halves
        ]
        self.half = 0

    def copy_out(self) -> None:
        """Bring what leaves to pinned memory, and wait until it is there."""
        if self._packing is not None:
            self._packing.pack(self._packed)
        self._memcpy(*self._copy_out)
        self._synchronize()

    def copy_in(self) -> None:
        """Bring what arrived to the ghosts, and let the next step use the other half."""
        self._memcpy(*self._copies_in[self.half])
        if self._packing is not None:
            self._packing.unpack(self._landed)
        self.half = 1 - self.half

    def step(self) -> None:
        """Exchange the ghosts."""
        irecv, isend = self.comm.Irecv, self.comm.Isend
        requests = [irecv(*each) for each in self.receives[self.half]]
        self.copy_out()
        requests += [isend(*each) for each in self.sends]
        MPI.Request.Waitall(requests)
        self.copy_in()

    def close(self) -> None:
        """Free the memory once nothing reads it any more."""
        self._synchronize()
        del self._packing, self._packed, self._landed, self.sends, self.receives
        del self._out, self._into


class StagedPersistent(Staged):
    """The same with persistent requests."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        comm = self.comm
        self._sends = [comm.Send_init(*each) for each in self.sends]
        self._receives = [[comm.Recv_init(*each) for each in half] for half in self.receives]
        self._all = [[*half, *self._sends] for half in self._receives]

    def step(self) -> None:
        """Exchange the ghosts."""
        half = self.half
        MPI.Prequest.Startall(self._receives[half])
        self.copy_out()
        MPI.Prequest.Startall(self._sends)
        MPI.Request.Waitall(self._all[half])
        self.copy_in()

    def close(self) -> None:
        """Free the requests and the memory."""
        for request in (*self._sends, *self._receives[0], *self._receives[1]):
            request.Free()
        super().close()


class Naive(Exchange[Grid]):
    """Axis by axis: asnumpy, Sendrecv and asarray for each face of each field."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self._xp = grid.session.node.xp
        self._axes = grid.sides_by_axis()

    def step(self) -> None:
        """Exchange the ghosts."""
        xp, sendrecv = self._xp, self.problem.comm.Sendrecv
        for pair in self._axes:
            for side in pair:
                for field in self.fields:
                    # Contiguous: CuPy forgets the current stream when it copies out what is not.
                    out = xp.asnumpy(xp.ascontiguousarray(field[side.out]))
                    into = np.empty_like(out)
                    sendrecv(out, side.to, side.number, into, side.source, side.number)
                    field[side.into] = xp.asarray(into)

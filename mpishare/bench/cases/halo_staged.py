"""The rivals of the halo cases on CUDA: MPI messages that go through the host.

`Pinned` is the strongest of them: one kernel packs all sides of all fields, one copy brings them to
pinned memory, and the same the other way round. `Naive` is what most programs do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from mpishare.bench.cases.halo_arms import HaloArm
from mpishare.bench.cases.halo_pack import Packing

if TYPE_CHECKING:
    from mpishare.bench.cases.halo_grid import Grid

# cudaMemcpyKind
_TO_DEVICE, _TO_HOST = 1, 2


class Pinned(HaloArm):
    """Pack, one copy out, Irecv and Isend, one copy in, unpack.

    The pinned memory that is received into alternates, so that a receive may be posted while the
    copy of the step before still runs.
    """

    def __init__(self, grid: Grid) -> None:
        import cupyx

        super().__init__(grid, grid.fields)
        xp, stream = grid.session.node.xp, grid.session.stream
        packing = self._packing = Packing(grid, self.fields)
        total = packing.total
        self._cart = grid.cart
        self._synchronize = stream.synchronize
        self._memcpy = xp.cuda.runtime.memcpyAsync
        # Held for the copies, which know addresses only.
        self._packed, self._landed = xp.zeros(total, "u8"), xp.zeros(total, "u8")
        self._out = cupyx.zeros_pinned(total, "u8")
        self._into = [cupyx.zeros_pinned(total, "u8") for _ in (0, 1)]
        # Everything that a call takes, found once.
        nbytes, number = int(self._packed.nbytes), int(stream.ptr)
        self._copy_out = (
            int(self._out.ctypes.data),
            int(self._packed.data.ptr),
            nbytes,
            _TO_HOST,
            number,
        )
        self._copies_in = [
            (int(self._landed.data.ptr), int(half.ctypes.data), nbytes, _TO_DEVICE, number)
            for half in self._into
        ]
        self._sends = [
            (words, side.neighbor, side.number)
            for words, side in zip(packing.split(self._out), grid.sides, strict=True)
        ]
        self._receives = [
            [
                (words, side.opposite, side.number)
                for words, side in zip(packing.split(half), grid.sides, strict=True)
            ]
            for half in self._into
        ]
        self._half = 0

    def step(self) -> None:
        """Exchange the ghosts."""
        half, cart = self._half, self._cart
        irecv, isend = cart.Irecv, cart.Isend
        requests = [irecv(*words) for words in self._receives[half]]
        self._packing.pack(self._packed)
        self._memcpy(*self._copy_out)
        self._synchronize()
        requests += [isend(*words) for words in self._sends]
        MPI.Request.Waitall(requests)
        self._memcpy(*self._copies_in[half])
        self._packing.unpack(self._landed)
        self._half = 1 - half

    def close(self) -> None:
        """Free the memory once nothing reads it any more."""
        self._synchronize()
        del self._packing, self._packed, self._landed
        del self._sends, self._receives, self._out, self._into


class Naive(HaloArm):
    """Axis by axis: asnumpy, Sendrecv and asarray for each face of each field."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid, grid.fields)
        self._xp = grid.session.node.xp
        self._phases = grid.phases()
        self._cart = grid.cart

    def step(self) -> None:
        """Exchange the ghosts."""
        xp, sendrecv = self._xp, self._cart.Sendrecv
        for pair in self._phases:
            for side in pair:
                for field in self.fields:
                    # Packed first: CuPy forgets the current stream when it copies out what is not.
                    out = xp.asnumpy(xp.ascontiguousarray(field[side.source]))
                    into = np.empty_like(out)
                    sendrecv(out, side.neighbor, side.number, into, side.opposite, side.number)
                    field[side.target] = xp.asarray(into)

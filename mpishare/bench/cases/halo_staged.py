"""The rivals of the halo cases on CUDA: MPI messages that go through the host.

`Pinned` is the strongest of them: one kernel packs all sides of all fields, one copy brings them to
pinned memory, and the same the other way round. `Naive` is what most programs do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpishare.bench.cases.halo_arms import HaloArm

if TYPE_CHECKING:
    from mpishare.bench.cases.halo_grid import Grid

# cudaMemcpyKind
_TO_DEVICE, _TO_HOST = 1, 2
_BLOCK = 256
#: A thread a word. Places are addresses, so that any number of fields and sides is one launch.
_KERNELS = r"""
extern "C" __global__ void pack(
    unsigned long long* buffer, const unsigned long long* places, long long count)
{
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < count) buffer[i] = *(const unsigned long long*)places[i];
}
extern "C" __global__ void unpack(
    const unsigned long long* buffer, const unsigned long long* places, long long count)
{
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < count) *(unsigned long long*)places[i] = buffer[i];
}
"""


class Pinned(HaloArm):
    """Pack, one copy out, Irecv and Isend, one copy in, unpack.

    The pinned memory that is received into alternates, so that a receive may be posted while the
    copy of the step before still runs.
    """

    def __init__(self, grid: Grid) -> None:
        import cupyx

        super().__init__(grid, grid.fields)
        xp, stream = grid.session.node.xp, grid.session.stream
        counts = [grid.count * grid.size(side) for side in grid.sides]
        total = sum(counts)
        self._cart = grid.cart
        self._synchronize = stream.synchronize
        self._memcpy = xp.cuda.runtime.memcpyAsync
        # Held for the kernels and copies, which know addresses only.
        sources = self._places([side.source for side in grid.sides])
        targets = self._places([side.target for side in grid.sides])
        packed, landed = xp.zeros(total, "u8"), xp.zeros(total, "u8")
        out = cupyx.zeros_pinned(total, "u8")
        into = [cupyx.zeros_pinned(total, "u8") for _ in (0, 1)]
        self._held = sources, targets, packed, landed, out, into
        module = xp.RawModule(code=_KERNELS)
        self._pack, self._unpack = module.get_function("pack"), module.get_function("unpack")
        self._launch = ((total + _BLOCK - 1) // _BLOCK,), (_BLOCK,)
        # Everything that a call takes, found once.
        self._pack_arguments = packed, sources, np.int64(total)
        self._unpack_arguments = landed, targets, np.int64(total)
        nbytes, number = int(packed.nbytes), int(stream.ptr)
        self._copy_out = int(out.ctypes.data), int(packed.data.ptr), nbytes, _TO_HOST, number
        self._copies_in = [
            (int(landed.data.ptr), int(half.ctypes.data), nbytes, _TO_DEVICE, number)
            for half in into
        ]
        ends = np.cumsum(counts)[:-1]
        self._sends = [
            (words, side.neighbor, side.number)
            for words, side in zip(np.split(out, ends), grid.sides, strict=True)
        ]
        self._receives = [
            [
                (words, side.opposite, side.number)
                for words, side in zip(np.split(half, ends), grid.sides, strict=True)
            ]
            for half in into
        ]
        self._half = 0
        # Loads both kernels: later that would wait for whatever the stream waits for.
        self._pack(*self._launch, self._pack_arguments)
        self._unpack(*self._launch, self._unpack_arguments)
        self._synchronize()

    def _places(self, cells: list[Any]) -> Any:
        """Return the addresses of these cells: side by side, there field by field."""
        xp, shape = self.grid.session.node.xp, self.grid.shape
        found = []
        for box in cells:
            offset = xp.zeros((), "i8")
            for axis, (span, extent) in enumerate(zip(box, shape, strict=True)):
                along = [1] * len(shape)
                along[axis] = -1
                offset = offset * extent + xp.arange(*span.indices(extent)).reshape(along)
            nbytes = self.fields[0].itemsize
            found += [offset.ravel() * nbytes + int(field.data.ptr) for field in self.fields]
        return xp.concatenate(found).astype("u8")

    def step(self) -> None:
        """Exchange the ghosts."""
        half, cart = self._half, self._cart
        irecv, isend = cart.Irecv, cart.Isend
        requests = [irecv(*words) for words in self._receives[half]]
        self._pack(*self._launch, self._pack_arguments)
        self._memcpy(*self._copy_out)
        self._synchronize()
        requests += [isend(*words) for words in self._sends]
        MPI.Request.Waitall(requests)
        self._memcpy(*self._copies_in[half])
        self._unpack(*self._launch, self._unpack_arguments)
        self._half = 1 - half

    def close(self) -> None:
        """Free the memory once nothing reads it any more."""
        self._synchronize()
        del self._pack_arguments, self._unpack_arguments, self._sends, self._receives, self._held


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

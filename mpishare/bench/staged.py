"""Messages through pinned memory, and the kernels that pack what leaves a GPU. CUDA only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from mpishare.bench.grid import Exchange, Problem, split
from mpishare.bench.session import Session

_WORD = 8
_BLOCK = 256
#: Thread blocks per box: enough of them to fill a GPU; larger boxes loop.
_MAX_BLOCKS = 1024
_AXES = 3


def address_of(array: Any) -> int:
    """Return the address of an array in memory of the host or of the GPU."""
    return int(array.ctypes.data if hasattr(array, "ctypes") else array.data.ptr)


def copy_call(session: Session, target: Any, source: Any) -> Callable[[], None]:
    """Return the CUDA runtime's copy between GPU and pinned memory, with addresses found now."""
    to_host, from_host = (hasattr(array, "ctypes") for array in (target, source))
    kind = 2 if to_host else 1 if from_host else 3  # cudaMemcpyKind
    memcpy, stream = session.node.xp.cuda.runtime.memcpyAsync, int(session.stream.ptr)
    return partial(memcpy, address_of(target), address_of(source), source.nbytes, kind, stream)


def side_sizes(problem: Problem, fields: Sequence[Any]) -> list[int]:
    """Return how many words leave through each side."""
    return [sum(int(view.size) for view in problem.leaving(side, fields)) for side in problem.sides]


def box_row(view: Any, address: int, first: int) -> list[int]:
    """Return a box of words as the kernels read it: address, place in the buffer, shape, steps."""
    missing = _AXES - view.ndim
    steps = [stride // _WORD for stride in view.strides]
    return [address, first, *[1] * missing, *view.shape, *[0] * missing, *steps]


class Packing:
    """The boxes of all sides, side by side and within a side field by field."""

    def __init__(self, problem: Problem, fields: Sequence[Any]) -> None:
        session = problem.session
        xp = session.node.xp
        sides, sizes = problem.sides, side_sizes(problem, fields)
        self._fields = tuple(fields)  # the kernels have addresses only
        self._sources, self._targets = (_table(xp, views) for views in problem.faces(fields))
        module = xp.RawModule(code=Path(__file__).with_name("packing.cu").read_text())
        self._pack, self._unpack = module.get_function("pack"), module.get_function("unpack")
        blocks = min(-(-max(sizes) // (len(fields) * _BLOCK)), _MAX_BLOCKS)
        self._launch = (blocks, len(sides) * len(fields)), (_BLOCK,)
        # Load both kernels now: loading them later would wait for whatever the stream waits for.
        scratch = xp.zeros(sum(sizes), "u8")
        self.pack(scratch)
        self.unpack(scratch)
        session.synchronize()

    def pack(self, buffer: Any) -> None:
        """Write what leaves into `buffer`. Stream-ordered."""
        self._pack(*self._launch, (buffer, self._sources))

    def unpack(self, buffer: Any) -> None:
        """Write `buffer` into the ghosts. Stream-ordered."""
        self._unpack(*self._launch, (buffer, self._targets))


def _table(xp: Any, views: Sequence[Any]) -> Any:
    rows, first = [], 0
    for view in views:
        rows.append(box_row(view, int(view.data.ptr), first))
        first += int(view.size)
    return xp.asarray(np.array(rows, "i8"))


class Staged(Exchange[Problem]):
    """Pack, one copy out, Irecv and Isend, one copy in, unpack.

    The pinned memory that is received into alternates, so that a receive may be posted while the
    copy of the step before still runs.
    """

    def __init__(self, problem: Problem) -> None:
        import cupyx

        super().__init__(problem)
        session, xp = problem.session, problem.session.node.xp
        sizes = side_sizes(problem, self.fields)
        self._packing: Packing | None = None
        # Held for the copies, which have addresses only.
        self._packed, self._landed = self.fields[0], self.fields[-1]
        if not problem.has_buffers:
            self._packing = Packing(problem, self.fields)
            self._packed, self._landed = (xp.zeros(sum(sizes), "u8") for _ in range(2))
        self.comm = problem.comm
        self._synchronize = session.synchronize
        self._out = cupyx.zeros_pinned(sum(sizes), "u8")
        self._into = [cupyx.zeros_pinned(sum(sizes), "u8") for _ in range(2)]
        self._copy_out = copy_call(session, self._out, self._packed)
        self._copies_in = [copy_call(session, self._landed, half) for half in self._into]
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
        self._copy_out()
        self._synchronize()

    def copy_in(self) -> None:
        """Bring what arrived to the ghosts, and let the next step use the other half."""
        self._copies_in[self.half]()
        if self._packing is not None:
            self._packing.unpack(self._landed)
        self.half = 1 - self.half

    def step(self) -> None:
        irecv, isend = self.comm.Irecv, self.comm.Isend
        requests = [irecv(*each) for each in self.receives[self.half]]
        self.copy_out()
        requests += [isend(*each) for each in self.sends]
        MPI.Request.Waitall(requests)
        self.copy_in()

    def close(self) -> None:
        self._synchronize()
        del self._packing, self._packed, self._landed, self.sends, self.receives
        del self._out, self._into

"""Messages through pinned memory. CUDA only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mpi4py import MPI

from mpishare.bench.grid import Call, Exchange, Problem
from mpishare.bench.session import Session, do_nothing


def address_of(array: Any) -> int:
    """Return the address of an array in memory of the host or of the GPU."""
    return int(array.ctypes.data if hasattr(array, "ctypes") else array.data.ptr)


def copy_call(session: Session, target: Any, source: Any) -> Callable[[], None]:
    """Return the CUDA runtime's copy between GPU and pinned memory, with addresses found now."""
    to_host, from_host = (hasattr(array, "ctypes") for array in (target, source))
    kind = 2 if to_host else 1 if from_host else 3  # cudaMemcpyKind
    memcpy, stream = session.node.xp.cuda.runtime.memcpyAsync, int(session.stream.ptr)
    return partial(memcpy, address_of(target), address_of(source), source.nbytes, kind, stream)


def through_host(
    session: Session,
    bind: Callable[..., tuple[Callable[[], object], Callable[[], object]]],
    *arrays: Any,
) -> tuple[Call, Call]:
    """Bind a call on pinned memory between copies: the first array out, the last one in.

    `bind` and this return a call, and another one that frees its resources.
    """
    import cupyx

    held = [cupyx.zeros_pinned(array.shape, array.dtype) for array in arrays]
    call, free = bind(*held)
    copy_out = copy_call(session, held[0], arrays[0])
    copy_in = copy_call(session, arrays[-1], held[-1])

    def run() -> None:
        copy_out()
        session.synchronize()
        call()
        copy_in()

    def free_all() -> None:
        session.synchronize()
        free()
        held.clear()  # until here: the copies have addresses only

    return run, free_all


class Staged(Exchange[Problem]):
    """Pack, one copy out, Irecv and Isend, one copy in, unpack.

    The pinned memory that is received into alternates, so that a receive may be posted while the
    copy of the step before still runs.
    """

    def __init__(self, problem: Problem) -> None:
        import cupyx

        super().__init__(problem)
        session, xp = problem.session, problem.session.node.xp
        words = max(sum(problem.slots()), 1)
        # Held for the copies, which have addresses only.
        self._packed, self._landed = self.fields[0], self.fields[-1]
        self._pack = self._unpack = do_nothing
        if not problem.has_buffers:
            self._packed, self._landed = (xp.zeros(words, "u8") for _ in range(2))
            self._pack, self._unpack = problem.packing(self.fields, self._packed, self._landed)
        self.comm = problem.comm
        self._synchronize = session.synchronize
        self._out = cupyx.zeros_pinned(words, "u8")
        self._into = [cupyx.zeros_pinned(words, "u8") for _ in range(2)]
        self._copy_out = copy_call(session, self._out, self._packed)
        self._copies_in = [copy_call(session, self._landed, half) for half in self._into]
        halves = [problem.parts(self._out, half) for half in self._into]
        self.sends = [(halves[0][0][side.number], side.to, side.number) for side in problem.sides]
        self.receives = [
            [(into[side.number], side.source, side.number) for side in problem.sides]
            for _, into in halves
        ]
        self.half = 0

    def copy_out(self) -> None:
        """Bring what leaves to pinned memory, and wait until it is there."""
        self._pack()
        self._copy_out()
        self._synchronize()

    def copy_in(self) -> None:
        """Bring what arrived to the ghosts, and let the next step use the other half."""
        self._copies_in[self.half]()
        self._unpack()
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
        del self._pack, self._unpack, self._packed, self._landed, self.sends, self.receives
        del self._out, self._into

"""Messages through pinned memory. CUDA only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mpi4py import MPI

from mpishare.bench.grid import Problem
from mpishare.bench.mpi import free
from mpishare.bench.session import Bound, Call, Session, do_nothing, in_turn


def address_of(array: Any) -> int:
    """Return the address of an array in memory of the host or of the GPU."""
    return int(array.ctypes.data if hasattr(array, "ctypes") else array.data.ptr)


def memory_of(array: Any) -> MPI.buffer:
    """Return the memory of an array as mpi4py takes it; it would inspect an array at each call."""
    return MPI.buffer.fromaddress(address_of(array), int(array.nbytes))


def copy_call(session: Session, target: Any, source: Any) -> Call:
    """Return the CUDA runtime's copy between GPU and pinned memory, with addresses found now."""
    to_host, from_host = (hasattr(array, "ctypes") for array in (target, source))
    kind = 2 if to_host else 1 if from_host else 3  # cudaMemcpyKind
    memcpy, stream = session.node.xp.cuda.runtime.memcpyAsync, int(session.stream.ptr)
    return partial(memcpy, address_of(target), address_of(source), source.nbytes, kind, stream)


def through_host(session: Session, bind: Callable[..., Bound], *arrays: Any) -> Bound:
    """Bind a call on pinned memory between copies: the first array out, the last one in."""
    import cupyx

    pinned = [cupyx.zeros_pinned(array.shape, array.dtype) for array in arrays]
    call, free = bind(*pinned)
    copy_out = copy_call(session, pinned[0], arrays[0])
    copy_in = copy_call(session, arrays[-1], pinned[-1])

    run = in_turn(copy_out, session.synchronize, call, copy_in)
    # Not dropped before: the copies have addresses only.
    return run, in_turn(session.synchronize, free, pinned.clear)


class Staging:
    """The pinned memory of an exchange, and the copies to it and from it.

    The memory that is received into alternates, so that a receive may be posted while the copy of
    the step before still runs.
    """

    def __init__(self, problem: Problem, fields: Sequence[Any]) -> None:
        import cupyx

        session, xp = problem.session, problem.session.node.xp
        words = max(sum(problem.slots()), 1)
        # For the copies, which have addresses only.
        self._packed, self._landed = fields[0], fields[-1]
        self._pack: Call = do_nothing
        self._unpack: Call = do_nothing
        if not problem.has_buffers:
            self._packed, self._landed = (xp.zeros(words, "u8") for _ in range(2))
            self._pack, self._unpack = problem.packing(fields, self._packed, self._landed)
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


def staged(problem: Problem, *fields: Any) -> Bound:
    """Bind a pack, one copy out, persistent requests, one copy in, an unpack."""
    staging, comm = Staging(problem, fields), problem.comm
    startall, waitall = MPI.Prequest.Startall, MPI.Request.Waitall
    sends = [comm.Send_init(*each) for each in staging.sends]
    receives = [[comm.Recv_init(*each) for each in half] for half in staging.receives]
    every = [[*half, *sends] for half in receives]

    def exchange() -> None:
        half = staging.half
        startall(receives[half])
        staging.copy_out()
        startall(sends)
        waitall(every[half])
        staging.copy_in()

    return exchange, partial(free, [*sends, *receives[0], *receives[1]])

"""The links of a solve without mpishare: messages of MPI, on the host and staged, and NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from mpi4py import MPI

from mpishare.bench.grid import Problem, Side
from mpishare.bench.library import transfers
from mpishare.bench.mpi import Isend
from mpishare.bench.session import Session, do_nothing
from mpishare.bench.staged import Staged, copy_call
from scripts.applications.poisson import Poisson


class Links:
    """What the ranks tell each other in a pass; here nothing, as if each rank were alone."""

    def add_squares(self) -> None:
        """Add up r . r over the ranks."""

    def start(self) -> None:
        """Let the ghosts of the residual begin to travel."""

    def wait(self) -> None:
        """Return when the ghosts are there, or will be for what is put on the stream."""

    def add_product(self) -> None:
        """Add up p . q over the ranks."""

    def close(self) -> None:
        """Free what was made for it."""


class Ghosts(Problem):
    """The ghosts of the residual, for the baselines: faces across the axes that are cut.

    Those across the first axis are whole planes of memory: nothing has to pack them.
    """

    def __init__(self, session: Session, problem: Poisson) -> None:
        self.session, self.comm = session, problem.cart
        rows = problem.rows["r"]
        self.fields = [rows]
        self.check: Any = self  # the ghosts are right where the solution is
        owned = problem.owned_in_rows
        found: list[Side] = []
        for axis, ranks in enumerate(problem.cart.dims):
            if ranks == 1:
                continue
            low, high = problem.cart.Shift(axis, 1)
            begin, end = owned[axis].start, owned[axis].stop
            for to, source, out, into in (
                (low, high, begin, end),
                (high, low, end - 1, begin - 1),
            ):
                sent, ghosts = (
                    tuple(
                        slice(at, at + 1) if i == axis else slice(None) if axis == 0 else span
                        for i, span in enumerate(owned)
                    )
                    for at in (out, into)
                )
                found.append(Side(to, source, len(found), sent, ghosts))
        self.sides = tuple(found)

    def poison(self, fields: Sequence[Any]) -> None:
        """Leave the ghosts: each solve begins with zeros there."""


class MpiLinks(Links):
    """On the host: Irecv and Isend, and Allreduce."""

    def __init__(self, session: Session, problem: Poisson) -> None:
        self._problem = problem
        self._exchange = Isend(Ghosts(session, problem))
        self._add = problem.cart.Allreduce

    def add_squares(self) -> None:
        self._add(MPI.IN_PLACE, self._problem.rr)

    def wait(self) -> None:
        self._exchange.step()

    def add_product(self) -> None:
        self._add(MPI.IN_PLACE, self._problem.pq)

    def close(self) -> None:
        self._exchange.close()


class StagedLinks(Links):
    """Through pinned memory: one wait for the faces and r . r, then messages beside Allreduce."""

    def __init__(self, session: Session, problem: Poisson) -> None:
        import cupyx

        self._session, self._add = session, problem.cart.Allreduce
        self._exchange = Staged(Ghosts(session, problem))
        self._requests: list[MPI.Request] = []
        self._rr, self._pq = cupyx.zeros_pinned(1), cupyx.zeros_pinned(1)
        copy = partial(copy_call, session)
        self._rr_out, self._rr_in = copy(self._rr, problem.rr), copy(problem.rr, self._rr)
        self._pq_out, self._pq_in = copy(self._pq, problem.pq), copy(problem.pq, self._pq)

    def add_squares(self) -> None:
        exchange = self._exchange
        irecv, isend = exchange.comm.Irecv, exchange.comm.Isend
        self._requests = [irecv(*each) for each in exchange.receives[exchange.half]]
        self._rr_out()
        exchange.copy_out()
        self._requests += [isend(*each) for each in exchange.sends]
        self._add(MPI.IN_PLACE, self._rr)
        self._rr_in()

    def wait(self) -> None:
        MPI.Request.Waitall(self._requests)
        self._exchange.copy_in()

    def add_product(self) -> None:
        self._pq_out()
        self._session.synchronize()
        self._add(MPI.IN_PLACE, self._pq)
        self._pq_in()

    def close(self) -> None:
        self._session.synchronize()
        self._exchange.close()


class NcclLinks(Links):
    """By NCCL: a group of sends and receives, and allReduce of one number.

    The operations of a communicator are in order, so the ghosts travel behind the sum of r . r;
    `beside`: on a stream of their own, beside the kernel that follows.
    """

    def __init__(self, session: Session, problem: Poisson, library: Any, beside: bool) -> None:
        from cupy.cuda import nccl

        from mpishare.bench.nccl import one_group

        ghosts = Ghosts(session, problem)
        cuda = self._cuda = problem.xp.cuda
        self._side = cuda.Stream(non_blocking=True, priority=-1) if beside else None
        self._forked, self._joined = (cuda.Event(disable_timing=True) for _ in range(2))
        comm, kind = library.communicator, nccl.NCCL_FLOAT64
        self._all_reduce = comm.allReduce
        pointers = (int(each.data.ptr) for each in (problem.rr, problem.pq))
        self._rr, self._pq = ((each, each, 1, kind, nccl.NCCL_SUM) for each in pointers)
        out, into = ghosts.faces(ghosts.fields)
        self._pack = self._unpack = do_nothing
        if not ghosts.has_contiguous_faces():
            memory = [problem.xp.zeros(sum(ghosts.slots())) for _ in range(2)]
            self._pack, self._unpack = ghosts.packing(ghosts.fields, *memory)
            out, into = ghosts.parts(*memory)
        self._held = out, into  # the calls have addresses only
        stream = int((self._side or session.stream).ptr)
        group, calls = (nccl.groupStart, nccl.groupEnd), (comm.send, comm.recv)
        self._move = one_group(transfers(ghosts.sides, out, into), group, calls, kind, stream)

    def add_squares(self) -> None:
        self._all_reduce(*self._rr, self._cuda.get_current_stream().ptr)

    def start(self) -> None:
        if self._side is None:
            self._exchange()
            return
        current = self._cuda.get_current_stream()
        self._forked.record(current)
        self._side.wait_event(self._forked)
        # CuPy's own `with` would forget the stream of the session.
        self._side.use()
        self._exchange()
        current.use()
        self._joined.record(self._side)

    def _exchange(self) -> None:
        self._pack()
        self._move()
        self._unpack()

    def wait(self) -> None:
        if self._side is not None:
            self._cuda.get_current_stream().wait_event(self._joined)

    def add_product(self) -> None:
        self._all_reduce(*self._pq, self._cuda.get_current_stream().ptr)

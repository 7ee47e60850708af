"""The links of a solve: by mpishare, by staged messages of MPI, and by NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mpi4py import MPI

import mpishare
from mpishare.bench.grid import Problem, Side
from mpishare.bench.library import transfers
from mpishare.bench.session import Call, Session, do_nothing, in_turn
from mpishare.bench.staged import Staging, copy_call
from scripts.applications.poisson import Poisson


@dataclass(frozen=True)
class Links:
    """What the ranks tell each other in a pass; by default nothing, as if each rank were alone."""

    add_squares: Call = do_nothing  # adds up r . r over the ranks
    start: Call = do_nothing  # lets the ghosts of the residual begin to travel
    wait: Call = do_nothing  # returns when the ghosts are there, or will be on the stream
    add_product: Call = do_nothing  # adds up p . q over the ranks
    close: Call = do_nothing


def mpishare_links(problem: Poisson, *, by_dot: bool = False) -> Links:
    """Return links by `HaloExchange` and `Allreduce`."""
    node, cart = problem.node, problem.cart
    halo = mpishare.HaloExchange(cart, problem.r, width=1, node=node)
    total = mpishare.Allreduce(cart, problem.rr, node=node)
    # Let go of by `close`: views of a window.
    owned = {name: getattr(problem, name)[problem.owned] for name in "rpq"}

    def add(scalar: Any, a: str, b: str) -> None:
        if by_dot:
            total.dot(owned[a], owned[b], out=scalar)
        else:
            total.reduce(scalar)

    return Links(
        add_squares=partial(add, problem.rr, "r", "r"),
        start=lambda: halo.start(problem.r),
        wait=halo.wait,
        add_product=partial(add, problem.pq, "p", "q"),
        close=in_turn(owned.clear, total.close, halo.close),
    )


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


def staged_links(session: Session, problem: Poisson) -> Links:
    """Return links through pinned memory: one wait for r . r and faces, then their messages."""
    import cupyx

    comm, ghosts, copy = problem.cart, Ghosts(session, problem), partial(copy_call, session)
    staging = Staging(ghosts, ghosts.fields)
    rr, pq = cupyx.zeros_pinned(1), cupyx.zeros_pinned(1)
    rr_out, rr_in = copy(rr, problem.rr), copy(problem.rr, rr)
    requests: list[MPI.Request] = []

    def add_squares() -> None:
        requests[:] = [comm.Irecv(*each) for each in staging.receives[staging.half]]
        rr_out()
        staging.copy_out()
        requests.extend(comm.Isend(*each) for each in staging.sends)
        comm.Allreduce(MPI.IN_PLACE, rr)
        rr_in()

    def wait() -> None:
        MPI.Request.Waitall(requests)
        staging.copy_in()

    add_product = in_turn(
        copy(pq, problem.pq),
        session.synchronize,
        partial(comm.Allreduce, MPI.IN_PLACE, pq),
        copy(problem.pq, pq),
    )
    return Links(add_squares, wait=wait, add_product=add_product, close=session.synchronize)


def nccl_links(session: Session, problem: Poisson, library: Any) -> Links:
    """Return links by NCCL: a group of sends and receives, and allReduce of one number.

    The operations of a communicator are in order, so the ghosts travel behind the sum of r . r.
    """
    ghosts, cuda = Ghosts(session, problem), problem.xp.cuda
    all_reduce, (_, kind, operation) = library.calls[2], library.kinds
    out, into = ghosts.faces(ghosts.fields)
    pack: Call = do_nothing
    unpack: Call = do_nothing
    if not ghosts.has_contiguous_faces():
        memory = [problem.xp.zeros(sum(ghosts.slots())) for _ in range(2)]
        pack, unpack = ghosts.packing(ghosts.fields, *memory)
        out, into = ghosts.parts(*memory)
    move = library.one_group(transfers(ghosts.sides, out, into), kind, int(session.stream.ptr))
    exchange = in_turn(pack, move, unpack)

    def add(scalar: Any, _held: Any = (out, into)) -> None:  # the calls have addresses only
        address = int(scalar.data.ptr)
        stream = cuda.get_current_stream().ptr
        all_reduce(address, address, 1, kind, operation, stream)

    return Links(partial(add, problem.rr), exchange, add_product=partial(add, problem.pq))

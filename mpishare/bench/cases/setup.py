"""Case ``setup``: making a node, windows, an event and plans; closing them is not counted.

All of it blocks the host, so that there is one clock. The baselines are a window of MPI alone, made
and filled by one rank, and for a plan on CUDA the least that any has to do: an allgather of memory
handles, and opening those of the neighbors.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from mpi4py import MPI

from mpishare import HaloExchange, Node
from mpishare.bench.comparison import Comparison, RefusedError, Variant
from mpishare.bench.measure import time_each
from mpishare.bench.report.rows import BASELINE, OWN
from mpishare.bench.session import do_nothing
from mpishare.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.bench.cases import Case
    from mpishare.bench.measure import BlockSize
    from mpishare.bench.report.rows import Clock, Kind, Row
    from mpishare.bench.session import Session

_NBYTES = 1 << 20
_FILL = 0x5A5A_5A5A_5A5A_5A5A
#: A node takes long enough that the median of a few is enough.
_LEAST_TURNS = 3
#: The fields of a plan: owned rows, and the cells of one, which is a face; and memory to be opened.
_OWNED, _CELLS, _HANDLE_NBYTES = 4, 64, 2 << 20


def run(session: Session, case: Case) -> list[Row]:
    """Run the case and return its rows. Collective, host-blocking."""
    comparison = Comparison(session, case, clocks=("latency",))

    def add(kind: type[_Make], make: Callable[[], _Make]) -> None:
        comparison.add(kind.name, make, kind=kind.kind, against=kind.against, nbytes=kind.nbytes)

    for kind in (_MakeNode, _MakeEvent, _Allocate, _AllocateEach):
        add(kind, partial(kind, session))
    cart = session.comm.Create_cart([session.comm.size], [True], reorder=False)
    for plan in (_Plan, _PlanOfMany, _SecondPlan):
        add(plan, partial(plan, session, cart))
    for baseline in (_AllocateShared, _Handles):
        if comparison.includes(baseline.name, nbytes=baseline.nbytes):
            add(baseline, partial(baseline, session))
    rows = comparison.run(_LEAST_TURNS)
    cart.Free()
    return rows


class _Make(Variant):
    """One thing that is made, checked and closed in each timed block."""

    name = ""
    nbytes = 0
    against: tuple[str, ...] = ()
    kind: Kind = OWN
    is_calibrated = False

    def __init__(self, session: Session) -> None:
        self.session = session
        self.node = session.node
        self._wrong = 0

    def make(self) -> Any:
        """Make it and return it. Collective."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Make what must exist before it, untimed. Collective."""

    def tidy(self) -> None:
        """Close what `prepare` made. Collective."""

    def wrong_in(self, made: Any) -> int:
        """Return how many words of it are wrong."""
        raise NotImplementedError

    def free(self, made: Any) -> None:
        """Close it. Collective."""
        made.close()

    def once(self) -> list[float]:
        """Make it once, check it and close it, and return the time of making in seconds."""
        made: Any = None
        reason: str | None = None

        def step() -> None:
            nonlocal made, reason
            made, reason = self.session.attempt(self.make)

        self.prepare()
        self.session.line_up()
        samples_s = time_each(step, do_nothing, 1)
        if made is not None:
            if self.session.options.check:
                self._wrong += self.wrong_in(made)
            self.free(made)
        self.tidy()
        if reason is not None:
            raise RefusedError(reason)
        return samples_s

    def time_block(self, session: Session, clock: Clock, size: BlockSize) -> list[float]:  # noqa: ARG002
        return self.once()

    def checked_step(self, token: int) -> None:
        """Do nothing: every block is checked."""

    def wrong(self) -> int:
        wrong, self._wrong = self._wrong, 0
        return wrong


class _MakeNode(_Make):
    name = "Node"

    def make(self) -> Any:
        return Node(self.session.comm, timeout_s=self.session.options.timeout_s)

    def wrong_in(self, made: Any) -> int:
        return int(made.ranks != self.node.ranks) + int(made.rank != self.node.rank)


class _MakeEvent(_Make):
    name = "event"

    def make(self) -> Any:
        return self.node.event()

    def wrong_in(self, made: Any) -> int:
        if self.node.is_leader:
            made.record()
        else:
            made.wait()
        self.session.synchronize()
        return 0


class _Allocate(_Make):
    name = "allocate"
    nbytes = _NBYTES
    against = ("allocate_shared",)

    def make(self) -> Any:
        return self.node.allocate((_NBYTES // 8,), "u8", fill=_FILL)

    def wrong_in(self, made: Any) -> int:
        return int((made.array != _FILL).sum())


class _AllocateEach(_Make):
    name = "allocate_each"
    nbytes = _NBYTES

    def make(self) -> Any:
        return self.node.allocate_each((_NBYTES // 8,), "u8", fill=_FILL)

    def wrong_in(self, made: Any) -> int:
        return sum(int((made.segment(rank) != _FILL).sum()) for rank in range(self.node.size))


class _AllocateShared(_Make):
    name = "allocate_shared"
    nbytes = _NBYTES
    kind = BASELINE

    def make(self) -> Any:
        comm = cast("MPI.Intracomm", self.node.comm)
        nbytes = _NBYTES if self.node.is_leader else 0
        window = MPI.Win.Allocate_shared(nbytes, 8, comm=comm)
        if self.node.is_leader:
            self._array(window).fill(_FILL)
        comm.Barrier()
        return window

    def _array(self, window: MPI.Win) -> Any:
        memory, _ = window.Shared_query(self.node.leader)
        return np.asarray(memory).view("u8")

    def wrong_in(self, made: Any) -> int:
        return int((self._array(made) != _FILL).sum())

    def free(self, made: Any) -> None:
        made.Free()


class _Plan(_Make):
    """The first plan of a node, for the ghosts of thin blocks in a ring, with warm kernels."""

    name = "plan"
    nbytes = 8 * _CELLS
    against = ("handles",)
    count = 1

    def __init__(self, session: Session, cart: MPI.Cartcomm) -> None:
        super().__init__(session)
        self.cart = cart
        shape = (_OWNED + 2, _CELLS)
        self.fields = [self.node.xp.full(shape, cart.rank, float) for _ in range(self.count)]
        # Loads the kernels, of the exchange and of its check.
        self.once()

    def prepare(self) -> None:
        """Make a node on which nothing has been opened yet."""
        self._new = Node(self.session.comm, timeout_s=self.session.options.timeout_s)

    def make(self) -> Any:
        return HaloExchange(self.cart, self.fields, 1, axes=(0,), node=self._new)

    def tidy(self) -> None:
        self._new.close()

    def wrong_in(self, made: Any) -> int:
        """Exchange once and return how many ghosts are wrong."""
        for field in self.fields:
            field[[0, -1]] = -1
        made.exchange(*self.fields)
        left, right = self.cart.Shift(0, 1)
        pairs = [(field[0], left) for field in self.fields]
        pairs += [(field[-1], right) for field in self.fields]
        return sum(int((ghosts != rank).sum()) for ghosts, rank in pairs)


class _PlanOfMany(_Plan):
    """The same for many fields."""

    name = "plan, 16 fields"
    count = 16


class _SecondPlan(_Plan):
    """A plan on a node that has another one of the same ranks."""

    name = "second plan"

    def prepare(self) -> None:
        """Make a node and the first plan."""
        super().prepare()
        self._first = self.make()

    def tidy(self) -> None:
        self._first.close()
        super().tidy()


class _Handles(_Make):
    """Opens memory of the neighbors in the ring, which each rank allocated before."""

    name = "handles"
    nbytes = 8 * _CELLS
    kind = BASELINE

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        if session.comm.size > self.node.size:
            raise UnsupportedError("memory handles are for one node")
        self._runtime = self.node.xp.cuda.runtime
        # Not from CuPy's pool: a handle stands for a whole allocation.
        self._address = self._runtime.malloc(_HANDLE_NBYTES)
        self._words(self._address)[:] = self.node.rank
        session.synchronize()

    def _words(self, address: int) -> Any:
        cuda = self.node.xp.cuda
        memory = cuda.UnownedMemory(address, _HANDLE_NBYTES, self)
        return self.node.xp.ndarray((_CELLS,), "u8", cuda.MemoryPointer(memory, 0))

    def make(self) -> Any:
        """Exchange the handles and open those of the neighbors. Collective."""
        comm = self.session.comm
        handles = comm.allgather(self._runtime.ipcGetMemHandle(self._address))
        peers = {(comm.rank + step) % comm.size for step in (-1, 1)} - {comm.rank}
        return {peer: self._runtime.ipcOpenMemHandle(handles[peer]) for peer in peers}

    def wrong_in(self, made: Any) -> int:
        """Return how many words of the neighbors' memory are wrong."""
        return sum(int((self._words(made[peer]) != peer).sum()) for peer in made)

    def free(self, made: Any) -> None:
        for address in made.values():
            self._runtime.ipcCloseMemHandle(address)

    def close(self) -> None:
        # After all have closed what they opened.
        self.session.comm.Barrier()
        self._runtime.free(self._address)

"""Of case ``setup`` what it takes to make a plan, and the least that any would take on CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishare import HaloExchange, Node
from mpishare.bench.cases.setup_make import Make

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpishare.bench.session import Session

#: Of a plan's fields: owned rows, and the cells of one, which is a face; of memory that is opened.
_OWNED, _CELLS, _HANDLE_NBYTES = 4, 64, 2 << 20


class Plan(Make):
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
        # Loads the kernels, of the exchange and of what looks at it.
        self.once()
        self._samples_s.clear()

    def prepare(self) -> None:
        """Make a node on which nothing has been opened yet."""
        self._new = Node(self.session.comm, timeout_s=self.session.options.timeout_s)

    def make(self) -> Any:
        """Make a plan. Collective."""
        return HaloExchange(self.cart, self.fields, 1, axes=(0,), node=self._new)

    def tidy(self) -> None:
        """Close the node."""
        self._new.close()

    def wrong(self, made: Any) -> int:
        """Exchange once and return how many ghosts are wrong."""
        for field in self.fields:
            field[[0, -1]] = -1
        made.exchange(*self.fields)
        left, right = self.cart.Shift(0, 1)
        pairs = [(field[0], left) for field in self.fields]
        pairs += [(field[-1], right) for field in self.fields]
        return sum(int((ghosts != rank).sum()) for ghosts, rank in pairs)


class PlanOfMany(Plan):
    """The same for many fields."""

    name = "plan, 16 fields"
    count = 16


class SecondPlan(Plan):
    """A plan on a node that has another of the same ranks."""

    name = "second plan"

    def prepare(self) -> None:
        """Make a node and the first plan."""
        super().prepare()
        self._first = self.make()

    def tidy(self) -> None:
        """Close both."""
        self._first.close()
        super().tidy()


class Handles(Make):
    """Memory of each rank, allocated before, that its neighbors in the ring open."""

    name = "handles"
    nbytes = 8 * _CELLS
    kind = "rival"

    def __init__(self, session: Session, reason: str | None = None) -> None:
        super().__init__(session, reason)
        self._address = 0
        if reason is None and session.comm.size > self.node.size:
            self.reason = "memory handles are for one node"
        if self.reason is None:
            _, self.reason = session.attempt(self._allocate)

    def _allocate(self) -> None:
        self._runtime = self.node.xp.cuda.runtime
        # Not of CuPy's pool: a handle is that of a whole allocation.
        self._address = self._runtime.malloc(_HANDLE_NBYTES)
        self._words(self._address)[:] = self.node.rank
        self.session.synchronize()

    def _words(self, address: int) -> Any:
        cuda = self.node.xp.cuda
        memory = cuda.UnownedMemory(address, _HANDLE_NBYTES, self)
        return self.node.xp.ndarray((_CELLS,), "u8", cuda.MemoryPointer(memory, 0))

    def make(self) -> Any:
        """Tell the handle and open the neighbors'. Collective."""
        comm = self.session.comm
        handles = comm.allgather(self._runtime.ipcGetMemHandle(self._address))
        peers = {(comm.rank + step) % comm.size for step in (-1, 1)} - {comm.rank}
        return {peer: self._runtime.ipcOpenMemHandle(handles[peer]) for peer in peers}

    def wrong(self, made: Any) -> int:
        """Return how many words of the neighbors' memory are wrong."""
        return sum(int((self._words(made[peer]) != peer).sum()) for peer in made)

    def free(self, made: Any) -> None:
        """Close what was opened."""
        for address in made.values():
            self._runtime.ipcCloseMemHandle(address)

    def close(self) -> None:
        """Free the memory. Collective."""
        # After all have closed what they opened.
        self.session.comm.Barrier()
        if self._address:
            self._runtime.free(self._address)

"""Reductions between nodes: their leaders combine the results by MPI messages.

The leader of a node, its first rank in the plan, packs the node's result in host memory. Small
results go to all leaders, which fold them in their order; of large ones each leader folds its
share, and sends it to the others. The rest of the node gets the result through shared memory. Large
fields that are packed in host memory are sent as they are, and a rank that is alone on its node
gets the result there, too. Ranks that take turns of a GPU go the same way, each as if it were a
node. All of it blocks the host, with the deadline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.coordination.counters import NO_WORDS, SLOT_NBYTES
from mpishare.coordination.mpi_agreement import never_free
from mpishare.coordination.poll import spin_until
from mpishare.memory.memory import address_of
from mpishare.plans.engine import PlanEngine
from mpishare.plans.layout import Layout, array_at, as_numpy
from mpishare.plans.message import Message
from mpishare.plans.mpi_route import MpiMessages
from mpishare.reduction.operation import packing_order, quiet_runner
from mpishare.reduction.partners import shares_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mpishare.plans.engine import PlanSetup
    from mpishare.reduction.operation import Operation

    Array = np.ndarray[Any, Any]

MIN_SHARED_NBYTES = 64 << 10
"""Fewer bytes go to all leaders at once: shares of them are not worth a second message."""
_PIECE_NBYTES = 4 << 20
"""The most that a leader folds at once: 128 MiB at once take three times as long."""
_MIN_IN_PLACE_NBYTES = 1 << 20
"""Fewer bytes are copied in less time than it takes to write what another core has just read."""
_MAX_BOUND = 16  # fields whose MPI requests a leader keeps


class Transfer:
    """Copies a field in host memory into packed host memory, and back. Host-blocking."""

    def __init__(self, setup: PlanSetup) -> None:
        self._order = packing_order(setup)

    def empty(self, count: int, dtype: np.dtype[Any]) -> Array:
        """Return packed memory of this rank for so many elements."""
        return np.empty(count, dtype)

    def fetch(self, field: Any, stream: Any, packed: Array) -> None:  # noqa: ARG002  no streams
        """Copy the elements of the field, once the stream has written them."""
        array = as_numpy(field, "a field")
        self._in_shape(packed, array)[...] = array

    def store(self, packed: Array, field: Any, stream: Any) -> None:  # noqa: ARG002  no streams
        """Copy the elements back; `packed` may be overwritten afterwards."""
        array = as_numpy(field, "a field")
        array[...] = self._in_shape(packed, array)

    def _in_shape(self, packed: Array, array: Array) -> Array:
        # To reshape them takes longer than to copy a few.
        return packed if array.ndim == 1 else packed.reshape(array.shape, order=self._order)


class AcrossNodes(PlanEngine):
    """Combines the results of nodes, or of ranks that stand for nodes: `groups` of ranks.

    Collective to make over the plan, host-blocking. `count` is the number of elements, one at
    least. A rank that is not in a group of its own is on the node of all of its group. Fields that
    are sent as they are, are known by their addresses, and not held.
    """

    def __init__(
        self,
        setup: PlanSetup,
        count: int,
        operation: Operation,
        transfer: Transfer,
        call: str,
        groups: Sequence[Sequence[int]],
    ) -> None:
        comm, dtype, layout = setup.comm, operation.dtype, setup.mine[0]
        self._comm, self._name, self._call = comm, setup.name, call
        self._subject = f"{setup.name}: {call}"
        self._agreement = setup.context.agreement
        self._memory_barrier = setup.context.memory_barrier
        self._spins_per_yield = setup.context.spins_per_yield
        self._operation, self._quietly = operation, quiet_runner()
        self._transfer = transfer
        mine = next(group for group in groups if comm.rank in group)
        self._leader, self._is_alone = mine[0], len(mine) == 1
        self._epoch, self.rank = 0, comm.rank
        self.leaders = [group[0] for group in groups]
        # Of fewer bytes each leader folds all.
        nleaders = len(self.leaders)
        nbytes: int = count * dtype.itemsize
        self.is_shared = nbytes >= max(MIN_SHARED_NBYTES, nleaders * dtype.itemsize)
        is_packed = not setup.on_gpu and layout.is_packed(packing_order(setup))
        self._is_sent_as_is = is_packed and self.is_shared
        most = nleaders * _PIECE_NBYTES // dtype.itemsize
        self._pieces = [slice(at, at + most) for at in range(0, count, most)]
        self._row = Layout(count, dtype).of_field()
        self._bound: dict[int, list[_Exchange]] = {}
        self._packed: list[_Exchange] = []
        # Pinned on CUDA, which makes copies faster. Of ranks that are alone each folds for itself,
        # in memory of its own.
        shared_nbytes = SLOT_NBYTES + (not self._is_alone) * nbytes
        self._memory = comm.take_memory(self._subject, shared_nbytes)
        self._done = self._memory.buffer[:SLOT_NBYTES].cast("Q")
        """Its first word: the last epoch with a complete result."""
        self.result: Array | None = None
        """None where it takes the place of the field."""
        if not self._is_alone:
            self.result = np.frombuffer(self._memory.buffer, dtype, count, SLOT_NBYTES)

        def make() -> int:
            """Allocate this rank's memory, and return its size in bytes."""
            if self._leader != comm.rank:
                return 0
            size = max(part.stop - part.start for part in self.parts(min(most, count)).values())
            others = [rank for rank in self.leaders if rank != comm.rank]
            self.arrived = {rank: np.empty(size, dtype) for rank in others}
            own: int = len(others) * size * dtype.itemsize
            if self._is_sent_as_is:
                return own
            if self._is_alone:
                self.result = transfer.empty(count, dtype)
            self._mine = transfer.empty(count, dtype)
            self._packed = self._bind(self._mine)
            return own + (1 + self._is_alone) * nbytes

        try:
            own = comm.step(self._subject, make)[comm.rank]
        except BaseException:
            self.close()
            raise
        self.staging_nbytes = self._memory.nbytes + own

    def reduce(self, field: Any, stream: Any) -> None:
        """Replace the result of this rank's group by that of all. Collective, host-blocking.

        That of a node must come from a reduction in which its ranks waited for each other: then no
        rank still reads the memory that the leader overwrites.
        """
        with self._agreement.blocked(self._subject):
            if self.rank == self._leader:
                self._exchange(field, stream)
            if not self._is_alone:
                self._pass_on()
            if self.result is not None:
                self._transfer.store(self.result, field, stream)

    def _exchange(self, field: Any, stream: Any) -> None:
        """Combine the results with the other leaders."""
        try:
            if self._is_sent_as_is:
                field = as_numpy(field, "a field")
                exchanges = self._exchanges_at(address_of(field))
            else:
                self._transfer.fetch(field, stream, self._mine)
                exchanges = self._packed
            for each in exchanges:
                each.reduce()
        except BaseException:
            if self._is_sent_as_is:
                never_free(field)  # messages may be under way
            raise

    def _exchanges_at(self, address: int) -> list[_Exchange]:
        """Return those of the field at an address, in place of the oldest if there are many."""
        found = self._bound.get(address)
        if found is None:
            if len(self._bound) == _MAX_BOUND:
                for each in self._bound.pop(next(iter(self._bound))):
                    each.close()
            found = self._bound[address] = self._bind(array_at(address, self._row))
        return found

    def _bind(self, mine: Array) -> list[_Exchange]:
        """Make the exchanges of packed elements, piece by piece."""
        result = mine if self.result is None else self.result
        return [_Exchange(self, mine[piece], result[piece]) for piece in self._pieces]

    def parts(self, size: int) -> dict[int, slice]:
        """Return the part of so many elements that each leader folds, by rank."""
        count = len(self.leaders)
        parts = shares_of(size, count) if self.is_shared else [slice(0, size)] * count
        return dict(zip(self.leaders, parts, strict=True))

    def messages(
        self, outgoing: Iterable[Array], incoming: Iterable[Array], step: int
    ) -> MpiMessages:
        """Make those of one step to and from the other leaders."""
        ends = [Message(rank, 2 * (self._call == "dot") + step, ()) for rank in self.arrived]
        given, got = ([each.view(np.uint8) for each in part] for part in (outgoing, incoming))
        return MpiMessages(self._comm, self._name, ends, ends, given, got, self._call)

    def fold(self, operands: Sequence[Array], out: Array) -> None:
        """Combine packed elements in the order of the operands, without warnings."""
        if len(operands) == 1:  # the only rank of its node, where those of others take turns
            out[...] = operands[0]
        else:
            self._quietly(self._operation.fold, operands, out)

    def _pass_on(self) -> None:
        """Signal that the result is there, as the leader; wait for that, as another rank."""
        epoch = self._epoch = self._epoch + 1
        if self.rank == self._leader:
            self._memory_barrier()
            self._done[0] = epoch
        elif not spin_until(self._done, 0, epoch, self._spins_per_yield):
            self._comm.wait(self._subject, lambda: [self._leader] if self._done[0] < epoch else [])
        self._memory_barrier()

    def close(self) -> None:
        for exchanges in (self._packed, *self._bound.values()):
            for each in exchanges:
                each.close()
        self._packed, self._bound, self.result = [], {}, None
        self._done = NO_WORDS
        self._memory.close()


class _Exchange:
    """One exchange between the leaders, on one of them; `mine` is a piece of its node's result."""

    def __init__(self, across: AcrossNodes, mine: Array, result: Array) -> None:
        parts = across.parts(result.size)
        own = parts.pop(across.rank)
        self._fold, self._share = across.fold, result[own]
        arrived = {rank: each[: self._share.size] for rank, each in across.arrived.items()}
        operands = arrived | {across.rank: mine[own]}
        self._operands = [operands[rank] for rank in across.leaders]
        # A fold may overwrite one of its first two operands, but no other.
        is_small = self._share.nbytes < _MIN_IN_PLACE_NBYTES
        is_apart = across.result is None and (is_small or across.rank not in across.leaders[:2])
        self._folded = next(iter(arrived.values())) if is_apart else self._share
        scattered = [mine[part] for part in parts.values()]
        self._steps = [across.messages(scattered, arrived.values(), 0)]
        if across.is_shared:
            gathered = [result[part] for part in parts.values()]
            self._steps.append(across.messages([self._folded] * len(parts), gathered, 1))

    def reduce(self) -> None:
        scatter, *gather = self._steps
        scatter.exchange()
        self._fold(self._operands, self._folded)
        for step in gather:
            step.exchange()
        if self._folded is not self._share:
            self._share[...] = self._folded

    def close(self) -> None:
        for step in self._steps:
            step.close()

"""Reductions between nodes: their leaders combine the results by MPI messages.

The leader of a node, its first rank in the plan, packs the node's result: in host memory, or in its
GPU's where the MPI takes that and the result is large. Small results go to all leaders, which fold
them in their order; of large ones each leader folds its share, and sends it to the others. The rest
of the node gets the result through shared memory. Large fields that are packed in host memory are
sent as they are, and a rank that is alone on its node gets the result there, too. All of it blocks
the host, with the deadline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.coordination.counters import NO_WORDS, SLOT_NBYTES
from mpishare.coordination.mpi_agreement import never_free
from mpishare.coordination.poll import spin_until
from mpishare.errors import MpiShareError
from mpishare.memory.memory import address_of
from mpishare.plans.engine import PlanEngine
from mpishare.plans.layout import Layout, array_at, as_numpy
from mpishare.plans.message import Message
from mpishare.plans.mpi_route import MpiMessages
from mpishare.reduction.operation import packing_order, quiet_runner

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mpishare.memory.types import Order
    from mpishare.plans.comm import PlanComm
    from mpishare.plans.engine import PlanSetup
    from mpishare.reduction.operation import Operation

    Array = np.ndarray[Any, Any]

MIN_SHARED_NBYTES = 64 << 10
"""Fewer bytes go to all leaders at once: shares of them are not worth a second message."""
_PIECE_NBYTES = 4 << 20
"""The most that a leader folds at once in host memory: 128 MiB at once take three times as long."""
_MIN_IN_PLACE_NBYTES = 1 << 20
"""Fewer bytes are copied in less time than it takes to write what another core has just read."""
_MAX_BOUND = 16  # fields whose MPI requests a leader keeps


class Transfer:
    """Copies a field into packed memory and back, and folds packed memory. Host-blocking.

    Both are in the host's memory; subclasses have others.
    """

    nbytes = 0

    def __init__(self, operation: Operation, order: Order) -> None:
        self._operation, self._order = operation, order
        self._quietly = quiet_runner()

    def share(self, comm: PlanComm, call: str, leader: int, count: int) -> Any:  # noqa: ARG002
        """Return the packed result that the leader writes and the ranks of its node read.

        Collective. None where it lies in the node's host memory.
        """
        return None

    def empty(self, count: int) -> Any:
        """Return packed memory of this rank for so many elements."""
        return np.empty(count, self._operation.dtype)

    def buffer(self, array: Any) -> Any:
        """Return packed memory in a form for MPI."""
        return array.view(np.uint8)

    def fetch(self, field: Any, stream: Any, packed: Any) -> None:  # noqa: ARG002  no streams
        """Copy the elements of the field, once the stream has written them."""
        array = as_numpy(field, "a field")
        self._in_shape(packed, array)[...] = array

    def store(self, packed: Any, field: Any, stream: Any) -> None:  # noqa: ARG002  no streams
        """Copy the elements back; `packed` may be overwritten afterwards."""
        array = as_numpy(field, "a field")
        array[...] = self._in_shape(packed, array)

    def _in_shape(self, packed: Any, array: Array) -> Any:
        """Return packed elements in the shape of an array."""
        # To reshape them takes longer than to copy a few.
        return packed if array.ndim == 1 else packed.reshape(array.shape, order=self._order)

    def fold(self, operands: Sequence[Any], out: Any) -> None:
        """Combine packed elements in the order of the operands, without warnings."""
        self._quietly(self._operation.fold, operands, out)

    def release(self) -> None:
        """Unmap the leader's memory."""

    def close(self, *, is_over: bool) -> None:
        """Free the memory, unless a message is under way, once all ranks have released."""


class AcrossNodes(PlanEngine):
    """Combines the results of all nodes of a plan.

    Collective to make, host-blocking. `count` is the number of elements, one at least.
    """

    has_imports = True

    def __init__(
        self, setup: PlanSetup, count: int, operation: Operation, transfer: Transfer, call: str
    ) -> None:
        comm, dtype = setup.comm, operation.dtype
        self._comm = comm
        self._agreement = setup.context.agreement
        self._memory_barrier = setup.context.memory_barrier
        self._spins_per_yield = setup.context.spins_per_yield
        self._call = f"{setup.name}: {call}"
        self._transfer = transfer
        self._leader = next(iter(comm.ranks_here))
        self._epoch = 0
        self._leaders: _Leaders | None = None
        is_sent_as_is = _is_sent_as_is(setup, count)
        self._is_alone = len(comm.ranks_here) == 1
        result = transfer.share(comm, self._call, self._leader, count)
        is_here = result is None and not (is_sent_as_is and self._is_alone)
        nbytes = count * dtype.itemsize if is_here else 0
        # Pinned on CUDA, which makes copies faster.
        self._memory = comm.take_memory(self._call, SLOT_NBYTES + nbytes)
        self._done = self._memory.buffer[:SLOT_NBYTES].cast("Q")
        """Its first word: the last epoch with a complete result."""
        if is_here:
            result = np.frombuffer(self._memory.buffer, dtype, count, SLOT_NBYTES)
        self._result: Any = result
        """None where it takes the place of the field."""

        def make() -> None:
            if comm.rank == self._leader:
                mine = None if is_sent_as_is else transfer.empty(count)
                self._leaders = _Leaders(setup, transfer, call, count, mine, result)

        try:
            comm.step(self._call, make)
        except BaseException:
            comm.step(self._call, self.release)
            self.close()
            raise
        own = 0 if self._leaders is None else self._leaders.nbytes
        self.staging_nbytes = self._memory.nbytes + transfer.nbytes + own

    def reduce(self, field: Any, stream: Any) -> None:
        """Replace the node's result by that of all nodes. Collective, host-blocking.

        The node's result must come from a reduction in which its ranks waited for each other: then
        no rank still reads the memory that the leader overwrites.
        """
        try:
            if self._leaders is not None:
                self._leaders.reduce(field, stream)
            if not self._is_alone:
                self._pass_on()
            if self._result is not None:
                self._transfer.store(self._result, field, stream)
        except BaseException as error:
            if not isinstance(error, MpiShareError):
                self._agreement.leave(self._call, error)
            raise

    def _pass_on(self) -> None:
        """Signal that the result is there, as the leader; wait for that, as another rank."""
        epoch = self._epoch = self._epoch + 1
        if self._leaders is not None:
            self._memory_barrier()
            self._done[0] = epoch
        elif not spin_until(self._done, 0, epoch, self._spins_per_yield):
            self._comm.wait(self._call, lambda: [self._leader] if self._done[0] < epoch else [])
        self._memory_barrier()

    def release(self) -> None:
        """Unmap GPU memory of the leader; host memory is unmapped in `close`."""
        self._result = None
        self._transfer.release()

    def close(self) -> None:
        """Free the MPI requests, and unmap the shared memory."""
        is_over = True
        if self._leaders is not None:
            is_over = self._leaders.close()
            self._leaders = None
        self._transfer.close(is_over=is_over)
        self._done = NO_WORDS
        self._memory.close()


class _Leaders:
    """The exchanges with the other leaders, on one of them: of `mine`, or of fields as they are.

    Fields are known by their addresses, and not held. The result is None if it takes their place.
    """

    def __init__(
        self, setup: PlanSetup, transfer: Transfer, call: str, count: int, mine: Any, result: Any
    ) -> None:
        comm, dtype = setup.comm, setup.mine[0].dtype
        self._comm, self._name, self._call = comm, setup.name, call
        self.transfer, self._mine, self.result = transfer, mine, result
        self.rank, self.ranks = comm.rank, _leaders_of(comm)
        nleaders = len(self.ranks)
        self.is_shared = _is_shared(count, dtype.itemsize, nleaders)
        most = count if setup.on_gpu else nleaders * _PIECE_NBYTES // dtype.itemsize
        self._pieces = [slice(at, at + most) for at in range(0, count, most)]
        size = max(part.stop - part.start for part in self.parts(min(most, count)).values())
        self.arrived = {rank: transfer.empty(size) for rank in self.ranks if rank != comm.rank}
        held = [each for each in (mine, *self.arrived.values()) if each is not None]
        self.nbytes = sum(each.nbytes for each in held)
        self._row = Layout(count, dtype).of_field()
        self._bound: dict[int, list[_Exchange]] = {}
        self._packed = [] if mine is None else self._bind(mine)

    def reduce(self, field: Any, stream: Any) -> None:
        """Combine the fields of all leaders. Host-blocking."""
        try:
            if self._mine is None:
                field = as_numpy(field, "a field")
                exchanges = self._exchanges_at(address_of(field))
            else:
                self.transfer.fetch(field, stream, self._mine)
                exchanges = self._packed
            for each in exchanges:
                each.reduce()
        except BaseException:
            if self._mine is None:
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

    def _bind(self, mine: Any) -> list[_Exchange]:
        """Make the exchanges of packed elements, piece by piece."""
        result = mine if self.result is None else self.result
        return [_Exchange(self, mine[piece], result[piece]) for piece in self._pieces]

    def parts(self, size: int) -> dict[int, slice]:
        """Return the part of so many elements that each leader folds, by rank."""
        count = len(self.ranks)
        ends = [size * at // count for at in range(count + 1)]
        parts = map(slice, ends, ends[1:]) if self.is_shared else [slice(0, size)] * count
        return dict(zip(self.ranks, parts, strict=True))

    def messages(self, outgoing: Iterable[Any], incoming: Iterable[Any], step: int) -> MpiMessages:
        """Make those of one step to and from the others."""
        ends = [Message(rank, 2 * (self._call == "dot") + step, ()) for rank in self.arrived]
        given, got = ([*map(self.transfer.buffer, arrays)] for arrays in (outgoing, incoming))
        return MpiMessages(self._comm, self._name, ends, ends, given, got, self._call)

    def close(self) -> bool:
        """Free the requests; return whether no message is under way."""
        made = [self._packed, *self._bound.values()]
        are_over = [each.close() for exchanges in made for each in exchanges]
        return all(are_over)


class _Exchange:
    """One exchange between the leaders, on one of them; `mine` is a piece of its node's result."""

    def __init__(self, leaders: _Leaders, mine: Any, result: Any) -> None:
        parts = leaders.parts(result.size)
        own = parts.pop(leaders.rank)
        self._transfer, self._share = leaders.transfer, result[own]
        arrived = {rank: each[: self._share.size] for rank, each in leaders.arrived.items()}
        operands = arrived | {leaders.rank: mine[own]}
        self._operands = [operands[rank] for rank in leaders.ranks]
        # A fold may overwrite one of its first two operands, but no other.
        is_small = self._share.nbytes < _MIN_IN_PLACE_NBYTES
        is_apart = leaders.result is None and (is_small or leaders.rank not in leaders.ranks[:2])
        self._folded = next(iter(arrived.values())) if is_apart else self._share
        scattered = [mine[part] for part in parts.values()]
        self._steps = [leaders.messages(scattered, arrived.values(), 0)]
        if leaders.is_shared:
            gathered = [result[part] for part in parts.values()]
            self._steps.append(leaders.messages([self._folded] * len(parts), gathered, 1))

    def reduce(self) -> None:
        """Combine the elements of all leaders in the result. Host-blocking."""
        scatter, *gather = self._steps
        scatter.exchange()
        self._transfer.fold(self._operands, self._folded)
        for step in gather:
            step.exchange()
        if self._folded is not self._share:
            self._share[...] = self._folded

    def close(self) -> bool:
        """Free the requests; return whether no message is under way."""
        are_over = [step.close() for step in self._steps]
        return all(are_over)


def _leaders_of(comm: PlanComm) -> list[int]:
    """Return the first rank of each node, in ascending order."""
    return sorted(comm.nodes.index(node) for node in {*comm.nodes})


def _is_sent_as_is(setup: PlanSetup, count: int) -> bool:
    """Whether this rank's field needs no packing, and is worth messages of its own."""
    layout, nleaders = setup.mine[0], len({*setup.comm.nodes})
    is_packed = not setup.on_gpu and layout.is_packed(packing_order(setup))
    return is_packed and _is_shared(count, layout.dtype.itemsize, nleaders)


def _is_shared(count: int, itemsize: int, nleaders: int) -> bool:
    """Whether leaders share so many elements; of fewer each folds all."""
    return count * itemsize >= max(MIN_SHARED_NBYTES, nleaders * itemsize)

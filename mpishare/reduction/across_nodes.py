"""Reductions between nodes: their leaders combine the results by MPI messages.

The leader of a node, its first rank in the plan, packs the node's result: in host memory, or in its
GPU's where the MPI takes that and the result is large. Small results go to all leaders, which fold
them in their order; of large ones each leader folds its share, and sends it to the others. The rest
of the node gets the result through shared memory. All of it blocks the host, with the deadline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.coordination.counters import NO_WORDS, SLOT_NBYTES
from mpishare.coordination.poll import spin_until
from mpishare.errors import MpiShareError
from mpishare.plans.engine import PlanEngine
from mpishare.plans.layout import as_numpy
from mpishare.plans.message import Message
from mpishare.plans.mpi_route import MpiMessages
from mpishare.reduction.operation import quiet_runner

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mpishare.memory.types import Order
    from mpishare.plans.comm import PlanComm
    from mpishare.plans.engine import PlanSetup
    from mpishare.reduction.operation import Operation

    Array = np.ndarray[Any, Any]

MIN_SHARED_NBYTES = 64 << 10
"""Fewer bytes go to all leaders at once: shares of them are not worth a second message."""


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
        shared = transfer.share(comm, self._call, self._leader, count)
        nbytes = count * dtype.itemsize if shared is None else 0
        # Pinned on CUDA, which makes copies faster.
        self._memory = comm.take_memory(self._call, SLOT_NBYTES + nbytes)
        self._done = self._memory.buffer[:SLOT_NBYTES].cast("Q")
        """Its first word: the last epoch with a complete result."""
        if shared is None:
            shared = np.frombuffer(self._memory.buffer, dtype, count, SLOT_NBYTES)
        self._result: Any = shared

        def make() -> None:
            if comm.rank == self._leader:
                self._leaders = _Leaders(comm, setup.name, self._result, transfer, call)

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
        epoch = self._epoch = self._epoch + 1
        try:
            if self._leaders is not None:
                self._transfer.fetch(field, stream, self._leaders.mine)
                self._leaders.reduce()
                self._memory_barrier()
                self._done[0] = epoch
            elif not spin_until(self._done, 0, epoch, self._spins_per_yield):
                self._comm.wait(self._call, lambda: [self._leader] if self._done[0] < epoch else [])
            self._memory_barrier()
            self._transfer.store(self._result, field, stream)
        except BaseException as error:
            if not isinstance(error, MpiShareError):
                self._agreement.leave(self._call, error)
            raise

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
    """The exchange between the leaders, on one of them; `mine` holds the result of its node."""

    def __init__(
        self, comm: PlanComm, name: str, result: Any, transfer: Transfer, call: str
    ) -> None:
        self._transfer = transfer
        leaders = sorted(comm.nodes.index(node) for node in {*comm.nodes})
        parts = _parts(result, leaders)
        own = parts.pop(comm.rank)
        self.mine, self._folded = transfer.empty(result.size), result[own]
        arrived = {rank: transfer.empty(self._folded.size) for rank in parts}
        operands = arrived | {comm.rank: self.mine[own]}
        self._operands = [operands[rank] for rank in leaders]
        self.nbytes = sum(each.nbytes for each in (self.mine, *arrived.values()))

        def messages(outgoing: Iterable[Any], incoming: Iterable[Any], tag: int) -> MpiMessages:
            ends = [Message(rank, tag, ()) for rank in parts]
            given, got = ([*map(transfer.buffer, arrays)] for arrays in (outgoing, incoming))
            return MpiMessages(comm, name, ends, ends, given, got, call)

        tag = 2 * (call == "dot")
        scattered = [self.mine[part] for part in parts.values()]
        self._steps = [messages(scattered, arrived.values(), tag)]
        if self._folded.size < result.size:
            gathered = [result[part] for part in parts.values()]
            self._steps.append(messages([self._folded] * len(parts), gathered, tag + 1))

    def reduce(self) -> None:
        """Combine `mine` of all leaders in the shared result. Host-blocking."""
        scatter, *gather = self._steps
        scatter.exchange()
        self._transfer.fold(self._operands, self._folded)
        for step in gather:
            step.exchange()

    def close(self) -> bool:
        """Free the requests; return whether no message is under way."""
        are_over = [step.close() for step in self._steps]
        return all(are_over)


def _parts(result: Any, leaders: Sequence[int]) -> dict[int, slice]:
    """Return the part of a result that each leader folds, by rank: all of a small one."""
    size, count = result.size, len(leaders)
    if result.nbytes < max(MIN_SHARED_NBYTES, count * result.itemsize):
        return dict.fromkeys(leaders, slice(0, size))
    ends = [size * at // count for at in range(count + 1)]
    return dict(zip(leaders, map(slice, ends, ends[1:]), strict=True))

"""Flags in pinned host memory, for all ranks of a plan on this node and their GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpishare.coordination.control_block import State
from mpishare.coordination.counters import NO_WORDS, SLOT_WORDS, whole_slots

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from mpishare.backends import Backend
    from mpishare.plans.comm import PlanComm, PlanMemory

# The words of one rank: four slots, then three rows with a word for each rank.
_CALLS, _STARTED, _FINISHED, _ABORT, _ROWS = (SLOT_WORDS * slot for slot in range(5))


class PinnedFlags:
    """The flags of a plan, followed by `nbytes` of pinned host memory for packed cells.

    Collective to make over the plan's ranks, host-blocking where memory must be mapped. Streams
    wait for the neighbors in `streamed`, kernels for the others. `calls` is one word, this rank's
    count.
    """

    def __init__(self, comm: PlanComm, name: str, nbytes: int, streamed: Collection[int]) -> None:
        self._context = comm.context
        self._streamed = streamed
        self._ranks = list(comm.ranks_here)
        self._ranks_in_node = comm.ranks_here
        self._rank = comm.rank
        self._row = whole_slots(len(self._ranks))
        self._stride = _ROWS + 3 * self._row
        self._count = self._stride * len(self._ranks)
        self._memory: PlanMemory | None = comm.take_memory(name, nbytes + 8 * self._count)
        self.nbytes = self._memory.nbytes
        self._address = self._memory.address
        self.staging_address = self._address + 8 * self._count
        self._view = self._memory.buffer[: 8 * self._count].cast("Q")
        # The watchdog releases these words, too, when it sees a rank die.
        self._context.counter_pool.watch(self._view)
        mine = self._index(self._rank, _CALLS)
        self.calls = self._view[mine : mine + 1]

    def ready(self, sender: int, receiver: int) -> int:
        """Return the address of the sender's flag: its cells are packed."""
        return self._address_of(sender, self._in_row(0, receiver))

    def consumed(self, receiver: int, sender: int) -> int:
        """Return the address of the receiver's flag: the cells are unpacked."""
        return self._address_of(receiver, self._in_row(1, sender))

    def stalled_on(self, peer: int) -> int:
        """Return the address of the word that is not 0 during this GPU's long wait for a peer."""
        return self._address_of(self._rank, self._in_row(2, peer))

    @property
    def started(self) -> int:
        """The address of this GPU's count of streamed exchanges begun."""
        return self._address_of(self._rank, _STARTED)

    @property
    def abort(self) -> int:
        """The address of the word that is not 0 once the watchdog has released all waits."""
        return self._address_of(self._rank, _ABORT)

    def mark_finished(self) -> None:
        """Publish that all streamed exchanges that this GPU has begun are done."""
        started = self._view[self._index(self._rank, _STARTED)]
        self._view[self._index(self._rank, _FINISHED)] = started

    def pending(self) -> list[int]:
        """Ranks of the node that this rank's GPU waits for, or that have made fewer calls.

        A kernel publishes its long waits. Where a stream waits, a rank is pending if it has begun
        fewer exchanges, or has left the node before these were done on its GPU.
        """
        view, state = self._view, self._context.agreement.block.state  # `close` may replace it
        mine = self._index(self._rank, 0)
        stalled_on = self._index(self._rank, _ROWS + 2 * self._row)

        def is_pending(index: int, peer: int) -> bool:
            theirs = self._stride * index
            if view[stalled_on + index] or view[theirs + _CALLS] < view[mine + _CALLS]:
                return True
            is_present = state(self._ranks_in_node[peer]) == State.PRESENT
            done = view[theirs + (_STARTED if is_present else _FINISHED)]
            return peer in self._streamed and done < view[mine + _STARTED]

        ranks = [peer for index, peer in enumerate(self._ranks) if is_pending(index, peer)]
        return [self._ranks_in_node[peer] for peer in ranks]

    def ahead(self) -> list[int]:
        mine = self._view[self._index(self._rank, _CALLS)]
        calls = {rank: self._view[self._index(rank, _CALLS)] for rank in self._ranks}
        return [self._ranks_in_node[rank] for rank, count in calls.items() if count > mine]

    def close(self) -> None:
        """Give the memory back, once the flags are no longer in use."""
        if self._memory is not None:
            self._context.counter_pool.unwatch(self._view)
            # Not released here: the watchdog may be reading it. The mapping goes with that view.
            self._view = self.calls = NO_WORDS
            self._memory.close()
            self._memory = None

    def _in_row(self, row: int, rank: int) -> int:
        return _ROWS + row * self._row + self._ranks.index(rank)

    def _index(self, rank: int, word: int) -> int:
        return self._stride * self._ranks.index(rank) + word

    def _address_of(self, rank: int, word: int) -> int:
        return self._address + 8 * self._index(rank, word)


class Signals:
    """Stores of 1 to flags, then waits for a 1 in other flags, and their reset to 0.

    By streams, for kernels that never wait. The rank that waits for a flag resets it. There are no
    counters, so that a captured graph can replay the same operations.
    """

    def __init__(
        self, backend: Backend, stored: Sequence[int] = (), awaited: Sequence[int] = ()
    ) -> None:
        operations = [("write", address, 1) for address in stored]
        for address in awaited:
            operations += [("wait", address, 1), ("write", address, 0)]
        self._values = [value for *_, value in operations]
        self._signals = backend.signals([(kind, address) for kind, address, _ in operations])

    def enqueue(self, stream: int) -> None:
        if self._values:
            self._signals.enqueue(stream, self._values)

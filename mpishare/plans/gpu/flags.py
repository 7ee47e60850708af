"""Flags in pinned host memory, for all ranks of a plan on this node and their GPUs."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from mpishare.coordination.control_block import State
from mpishare.coordination.counters import NO_WORDS, SLOT_WORDS, whole_slots

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from mpishare.backends import Backend
    from mpishare.plans.comm import PlanComm, PlanMemory

# The words of one rank: four slots, then three rows with a word for each rank.
_CALLS, _BEGUN, _DONE, _ABORT, _ROWS = (SLOT_WORDS * slot for slot in range(5))


class Host(ctypes.Structure):
    """Host memory of a wait; ``struct Host`` of wait.cuh."""

    _fields_ = (("stalled_on", ctypes.c_uint64), ("abort", ctypes.c_uint64))


class PinnedFlags:
    """The flags of a plan, followed by `nbytes` of pinned host memory for packed cells.

    Collective to make over the plan's ranks, host-blocking where memory must be mapped. Streams
    wait for the neighbors in `streamed`, kernels for the others. `calls` is one word, this rank's
    count.
    """

    def __init__(self, comm: PlanComm, name: str, nbytes: int, streamed: Collection[int]) -> None:
        self._context = comm.context
        self.streamed = streamed
        self._ranks = list(comm.ranks_here)
        self._ranks_in_node = comm.ranks_here
        self.rank = comm.rank
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
        mine = self._index(self.rank, _CALLS)
        self.calls = self._view[mine : mine + 1]
        for peer in streamed:  # which may pack a first call
            self._view[self._index(self.rank, self._in_row(1, peer))] = 1

    @property
    def staging(self) -> memoryview:
        """The pinned memory behind the flags, as the host has it."""
        return NO_WORDS if self._memory is None else self._memory.buffer[8 * self._count :]

    def ready(self, sender: int, receiver: int) -> int:
        """Return the address of the sender's flag: its cells are packed."""
        return self._address_of(sender, self._in_row(0, receiver))

    def seen(self, receiver: int, sender: int) -> int:
        """Return the address of the receiver's flag: its stream has reset `ready`."""
        return self._address_of(receiver, self._in_row(1, sender))

    def stalled_on(self, peer: int) -> int:
        """Return the address of the word that is not 0 during this GPU's long wait for a peer."""
        return self._address_of(self.rank, self._in_row(2, peer))

    @property
    def begun(self) -> int:
        """The address of this GPU's count of streamed calls begun."""
        return self._address_of(self.rank, _BEGUN)

    @property
    def done(self) -> int:
        """The address of this GPU's count of streamed calls done."""
        return self._address_of(self.rank, _DONE)

    @property
    def abort(self) -> int:
        """The address of the word that is not 0 once the watchdog has released all waits."""
        return self._address_of(self.rank, _ABORT)

    def progress(self) -> tuple[int, bool]:
        """Return how many streamed calls are done on this GPU, and whether one is under way."""
        if not self._view:
            return 0, False
        begun, done = (self._view[self._index(self.rank, each)] for each in (_BEGUN, _DONE))
        return done, begun > done

    def are_read(self) -> bool:
        """Whether the others have read what this GPU has packed for their streams."""
        begun = self._view[self._index(self.rank, _BEGUN)]
        return all(self._view[self._index(peer, _DONE)] >= begun for peer in self.streamed)

    def pending(self) -> list[int]:
        """Ranks of the node that this rank's GPU waits for, or that have made fewer calls.

        A kernel publishes its long waits. Where a stream waits, a rank is pending if it has begun
        fewer calls, or has left the node before these were done on its GPU.
        """
        view, state = self._view, self._context.agreement.block.state  # `close` may replace it
        mine = self._index(self.rank, 0)
        stalled_on = self._index(self.rank, _ROWS + 2 * self._row)

        def is_pending(index: int, peer: int) -> bool:
            theirs = self._stride * index
            if view[stalled_on + index] or view[theirs + _CALLS] < view[mine + _CALLS]:
                return True
            is_present = state(self._ranks_in_node[peer]) == State.PRESENT
            done = view[theirs + (_BEGUN if is_present else _DONE)]
            return peer in self.streamed and done < view[mine + _BEGUN]

        ranks = [peer for index, peer in enumerate(self._ranks) if is_pending(index, peer)]
        return [self._ranks_in_node[peer] for peer in ranks]

    def close(self) -> None:
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
    """Stores of 1 to flags, each once a 1 is in other flags, which are reset to 0.

    By streams, for kernels that never wait. The rank that waits for a flag resets it. There are no
    counters, so that a captured graph can replay the same operations.
    """

    def __init__(self, backend: Backend, awaited: Iterable[int], stored: Iterable[int]) -> None:
        operations: list[tuple[str, int, int]] = []
        for address in awaited:
            operations += [("wait", address, 1), ("write", address, 0)]
        operations += [("write", address, 1) for address in stored]
        self._values = [value for *_, value in operations]
        self._signals = backend.signals([(kind, address) for kind, address, _ in operations])

    def enqueue(self, stream: int) -> None:
        if self._values:
            self._signals.enqueue(stream, self._values)


class Handshake:
    """The signals of a call between this rank and those for which its streams wait.

    `ready` stores that the call is packed, once the others have seen the flags of the call before;
    `seen` waits until they have packed theirs. Between all of them and in both directions, also
    where nothing is sent: a rank that has packed a call has unpacked the one before.
    """

    def __init__(self, backend: Backend, flags: PinnedFlags) -> None:
        me, peers = flags.rank, flags.streamed

        def of(flag: Callable[[int, int], int]) -> tuple[list[int], list[int]]:
            return [flag(me, peer) for peer in peers], [flag(peer, me) for peer in peers]

        (ready, their_ready), (seen, their_seen) = of(flags.ready), of(flags.seen)
        self.ready = Signals(backend, their_seen, ready)
        self.seen = Signals(backend, their_ready, seen)

"""The words that the ranks of a plan have in common on CUDA, and host memory behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpishare.coordination.control_block import State
from mpishare.coordination.counters import SLOT_WORDS
from mpishare.memory.shared import SharedAllocation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.halo.plan_comm import PlanComm

_CALLED, _STARTED, _FINISHED, _ENDED, _FLAGS = (SLOT_WORDS * place for place in range(5))


class PinnedFlags:
    """Words of host memory that every rank here and its GPU sees.

    Parameters
    ----------
    ranks : PlanComm
        The plan's.
    nbytes : int, bytes
        Of host memory behind the words, for packed cells.
    relayed : set of int
        Those neighbors that streams wait for, not kernels.

    Attributes
    ----------
    common : SharedAllocation
        The memory; all steps are done before `attach`, which does the last of them.
    behind : int
        Where the GPU sees the memory behind the words.
    calls : memoryview
        One word: how often this rank has called.
    """

    def __init__(self, ranks: PlanComm, nbytes: int, relayed: set[int]) -> None:
        self._context = ranks.context
        self._relayed = relayed
        self._team = list(ranks.ranks_here)
        self._places = ranks.ranks_here
        self._rank = ranks.rank
        self._row = -(-len(self._team) // SLOT_WORDS) * SLOT_WORDS
        self._stride = _FLAGS + 3 * self._row
        self._count = self._stride * len(self._team)
        nbytes += 8 * self._count
        self.common = SharedAllocation(nbytes, is_maker=self._team[0] == self._rank)
        self._registered: list[int] = []
        self._view = self.calls = memoryview(b"").cast("Q")

    def attach(self, told: Sequence[str]) -> None:
        """Map it and let the GPU see it, given what `SharedAllocation.publish` returned. Local."""
        self.common.attach(told[rank] for rank in self._team)
        memory = self.common.memory
        memory.close_file()
        self.nbytes = memory.nbytes
        self._registered.append(self._context.backend.register(memory))
        self._address = self._registered[0]
        self.behind = self._address + 8 * self._count
        self._view = memoryview(memory.buffer)[: 8 * self._count].cast("Q")
        # A watchdog that sees a death lets go what waits for these words too.
        self._context.counter_pool.watch(self._view)
        self._called = self._stride * self._team.index(self._rank) + _CALLED
        self.calls = self._view[self._called : self._called + 1]

    def data(self, sender: int, receiver: int) -> int:
        """Return the address of the word that says: the cells are there."""
        return self._of(sender, _FLAGS + self._team.index(receiver))

    def taken(self, receiver: int, sender: int) -> int:
        """Return the address of the word that says: the cells were taken."""
        return self._of(receiver, _FLAGS + self._row + self._team.index(sender))

    def late(self, peer: int) -> int:
        """Return the address of the word that is not 0 while my GPU waits long for a peer."""
        return self._of(self._rank, _FLAGS + 2 * self._row + self._team.index(peer))

    @property
    def started(self) -> int:
        """The address of the word in which my GPU says how many exchanges it has begun to relay."""
        return self._of(self._rank, _STARTED)

    @property
    def ended(self) -> int:
        """The address of the word that is 0 until the node has been given up."""
        return self._of(self._rank, _ENDED)

    def finish(self) -> None:
        """Say that all that my GPU has begun is over."""
        started = self._called - _CALLED + _STARTED
        self._view[started - _STARTED + _FINISHED] = self._view[started]

    def pending(self) -> list[int]:
        """Ranks of the node that have called less often, or that my GPU waits for. Local.

        It says so itself where a kernel waits. Where a stream does, those count that have begun
        less often, or have left before what this rank has begun was over on theirs.
        """
        view, stride, mine = self._view, self._stride, self._called
        late = mine - _CALLED + _FLAGS + 2 * self._row
        state = self._context.agreement.state

        def lags(place: int, peer: int) -> bool:
            at = stride * place
            if view[late + place] or view[at + _CALLED] < view[mine + _CALLED]:
                return True
            word = _STARTED if state(self._places[peer]) == State.PRESENT else _FINISHED
            return peer in self._relayed and view[at + word] < view[mine + _STARTED]

        return [self._places[peer] for place, peer in enumerate(self._team) if lags(place, peer)]

    def close(self) -> None:
        """Unmap. Local, once nothing is under way."""
        if self._registered:
            self._context.counter_pool.unwatch(self._view)
            # Not released: a watchdog may look at it just now. The mapping goes with the last look.
            self._view = self.calls = memoryview(b"").cast("Q")
            self._context.backend.unregister(self.common.memory)
            self._registered = []
        self.common.close()

    def _of(self, rank: int, word: int) -> int:
        return self._address + 8 * (self._stride * self._team.index(rank) + word)

"""Shared host memory of one `Allreduce`: per rank, control words and two slots.

Every rank writes its own control words and slots, and reads those of all::

    READY      for even epochs and for odd ones: the epoch and the call, in one word
    PLACE      for even epochs and for odd ones: the location of the rank's field, if in a window

Each epoch is a barrier. Words are double-buffered by its parity, slots by that of their use: a rank
overwrites those of use k in use k + 2. It has passed the barrier of use k + 1 by then, so all
others are done with use k.

In a use each rank folds the slots of all. Of many bytes or ranks that is much to read: then each
folds a share, whose result takes the place of the operand in its own slot, and a second barrier
ends with the shares of all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.coordination.control_block import State
from mpishare.coordination.counters import NO_WORDS, SLOT_NBYTES, SLOT_WORDS
from mpishare.coordination.life import Event
from mpishare.coordination.poll import spin_until
from mpishare.errors import mismatch
from mpishare.plans.message import padded
from mpishare.runtime.context import Location

if TYPE_CHECKING:
    from mpishare.plans.comm import PlanComm

    Array = np.ndarray[Any, Any]

CALLS = ("reduce", "dot")
REDUCE, DOT = range(len(CALLS))
_BARRIER_NBYTES = 5 << 10  # that a rank reads in the time that a barrier takes, per rank
_SLOT_NBYTES = 512 << 10
_PLACES = 4  # behind the words of READY
_PLACE_WORDS = len(Location._fields)


def folds_all(nranks: int, nbytes: int) -> bool:
    """Whether every rank folds all elements; folding a share of them costs a second barrier."""
    # It reads the slots of all; else its share of them, and the results of the others.
    return (nranks - 1) ** 2 * nbytes < nranks**2 * _BARRIER_NBYTES


def capacity(count: int, itemsize: int) -> int:
    """Return the elements of a slot; chunks of a field of `count` that is larger are alike."""
    nchunks = max(1, -(-count * itemsize // _SLOT_NBYTES))
    return max(1, -(-count // nchunks))


class Slots:
    """The shared memory of the plan's ranks on this node. Collective to make, host-blocking.

    Slots have room for `size` elements.
    """

    def __init__(self, comm: PlanComm, name: str, dtype: np.dtype[Any], size: int) -> None:
        self._comm = comm
        self.name = name
        self._dtype = dtype
        self._memory_barrier = comm.context.memory_barrier
        self._spins_per_yield = comm.context.spins_per_yield
        self._ranks = [*comm.ranks_here]
        self._epoch = 0
        begin, count = SLOT_NBYTES * len(self._ranks), len(self._ranks)
        stride = padded(size * dtype.itemsize, SLOT_NBYTES)
        self._memory = comm.take_memory(name, begin + 2 * count * stride)
        self.nbytes = self._memory.nbytes
        words = self._memory.buffer[:begin].cast("Q")
        self._control = [words[at : at + SLOT_WORDS] for at in range(0, len(words), SLOT_WORDS)]
        self.parity = 0  # of the last use; flipped before each
        self.place = self._ranks.index(comm.rank)  # among the ranks on this node
        self._mine = self._control[self.place]
        self._others = [*self._control[: self.place], *self._control[self.place + 1 :]]
        base = np.frombuffer(self._memory.buffer, dtype=np.uint8)
        self._bytes = [base[begin + at * stride :][:stride] for at in range(2 * count)]
        self.pair = self.pair_of(dtype)
        self.size = size

    def pair_of(self, dtype: np.dtype[Any]) -> tuple[list[Array], list[Array]]:
        """Return the slots of even and of odd uses as elements of a dtype."""
        slots = [each.view(dtype) for each in self._bytes]
        return slots[: len(self._ranks)], slots[len(self._ranks) :]

    def meet(self, kind: int) -> None:
        """Barrier: writes of all ranks before it are visible to all after it. Host-blocking.

        `MismatchError` on every rank, and the end of the node, unless all are in the same call
        `kind`, an index of `CALLS`.
        """
        epoch = self._epoch = self._epoch + 1
        word, value = epoch & 1, 2 * epoch + kind
        self._memory_barrier()
        self._mine[word] = value
        for theirs in self._others:
            # A rank that is in another call has a word of this epoch, too.
            has_come = spin_until(theirs, word, value & ~1, self._spins_per_yield)
            if not has_come or theirs[word] != value:
                self.wait(value)
        self._memory_barrier()

    def share(self, count: int, place: int) -> slice:
        """Return the slice of elements that a rank folds: whole slots of words but for the last."""
        line, nranks = SLOT_NBYTES // self._dtype.itemsize, len(self._ranks)
        begin, end = (count * at // nranks // line * line for at in (place, place + 1))
        return slice(begin, count if place == nranks - 1 else end)

    def compiled(self, key: str, dtype: np.dtype[Any]) -> Any:
        """Return the compiled `reduce` of elements in the slots by an operation's key, or None."""
        context = self._comm.context
        module = context.compiled
        if module is None or not module.can_reduce(key):
            return None
        return module.Reduce(
            key,
            np.ndarray,
            dtype,
            self._bytes[0].size // dtype.itemsize,
            len(self._ranks),
            self.place,
            self._memory.buffer,
            context.looks_per_yield,
        ).reduce

    def next_epoch(self) -> int:
        """Return the epoch of a barrier in compiled code, which calls `wait` if it takes long."""
        self._epoch += 1
        return self._epoch

    def publish_place(self, place: Location) -> None:
        """Publish this rank's location, for `places` after the next barrier."""
        begin = _PLACES + _PLACE_WORDS * ((self._epoch + 1) & 1)
        for at, word in enumerate(place, begin):
            self._mine[at] = word

    def places(self) -> list[Location]:
        """Return the locations that all ranks published before the last barrier."""
        begin = _PLACES + _PLACE_WORDS * (self._epoch & 1)
        return [Location(*theirs[begin : begin + _PLACE_WORDS]) for theirs in self._control]

    def require_present(self) -> None:
        """Raise if a rank has left amid the call: its field may have been overwritten.

        One whose program has ended had come to the end of the call: the others had read its field.
        """
        self._memory_barrier()
        block, ranks_here = self._comm.context.agreement.block, self._comm.ranks_here

        def may_have_left(rank: int) -> bool:
            return not block.is_here(rank) and block.state(rank) != State.EXITED

        gone = [rank for rank in self._ranks if may_have_left(ranks_here[rank])]
        if gone:
            self._comm.wait(self._call(REDUCE), lambda: gone)  # raises, with the reason

    def close(self) -> None:
        self._control, self._others = [], []
        self._mine = NO_WORDS
        self._bytes, self.pair = [], ([], [])
        self._memory.close()

    def wait(self, value: int) -> None:
        """Wait until all ranks are in the epoch of `value`; raise if one of them made another call.

        `value` is this rank's word: twice the epoch, plus the call. Host-blocking.
        """
        word, least = value >> 1 & 1, value & ~1  # for any call
        self._comm.wait(self._call(value), lambda: self._behind(word, least))
        self._memory_barrier()
        calls = [CALLS[theirs[word] & 1] for theirs in self._control]
        if len({*calls}) > 1:
            differing = mismatch(
                f"{self.name}: {CALLS[value & 1]} failed: ranks made different calls",
                dict(zip(self._ranks, calls, strict=True)),
                self._ranks[self.place],
                "called",
                "All ranks make the same ones.",
            )
            raise self._comm.context.life.end_by(Event.DISORDER, differing)

    def _call(self, value: int) -> str:
        return f"{self.name}: {CALLS[value & 1]}"

    def _behind(self, word: int, least: int) -> list[int]:
        pairs = zip(self._ranks, self._control, strict=True)
        return [rank for rank, theirs in pairs if theirs[word] < least]

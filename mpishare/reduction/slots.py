"""Shared host memory of one `Allreduce`: per rank, control words, two small slots and a large one.

Every rank writes its own control words and slots, and reads those of all::

    READY      for even epochs and for odd ones: the epoch and the call, in one word
    PLACE      for even epochs and for odd ones: where the rank's field is, if in a window

In each epoch all ranks meet. Words are double-buffered by its parity, small slots by that of their
use: a rank overwrites those of use k in use k + 2. It has met all others in use k + 1 by then, so
that these are done with use k.
"""

from __future__ import annotations

from itertools import accumulate
from os import sched_yield
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from mpishare.context import Location
from mpishare.coordination.counters import SLOT_WORDS
from mpishare.coordination.poll import SPINS
from mpishare.errors import ClosedError, MismatchError

if TYPE_CHECKING:
    from mpishare.halo.plan_comm import PlanComm

    Array = np.ndarray[Any, Any]

CALLS = ("reduce", "dot")
REDUCE, DOT = range(len(CALLS))
_PLACES = 4  # behind the words of READY
_PLACE_WORDS = len(Location._fields)
_ALIGN = 128  # slots of two ranks never share a cache line


class Slots:
    """The shared memory of the plan's ranks on this node. Collective to make, host-blocking.

    Parameters
    ----------
    comm : PlanComm
        The ranks of the plan.
    name : str
        The plan's.
    dtype : numpy.dtype
        Of the elements.
    small, large : int
        Elements per small slot, and per large one; there may be no large ones.

    Attributes
    ----------
    pair : pair of list of numpy.ndarray
        The small slots for even and for odd uses: one for each rank on this node, in order.
    stacked : pair of numpy.ndarray
        The same as arrays of two axes: the ranks, and the elements of a slot.
    large : list of numpy.ndarray
        The large slot of each rank.
    parity : int
        Of the last use; flipped before each.
    place : int
        That of this rank among the ranks on this node.
    nbytes : int, bytes
        Of all ranks: it is there once per node.
    """

    def __init__(
        self, comm: PlanComm, name: str, dtype: np.dtype[Any], small: int, large: int
    ) -> None:
        self._comm = comm
        self._name = name
        self._dtype = dtype
        self._memory_barrier = comm.context.memory_barrier
        self._spins_per_yield = comm.context.spins_per_yield
        self._ranks = [*comm.ranks_here]
        self._epoch = 0
        begin, count = 8 * SLOT_WORDS * len(self._ranks), len(self._ranks)
        sizes = [*[small] * (2 * count), *[large] * count]
        strides = [-(-size * dtype.itemsize // _ALIGN) * _ALIGN for size in sizes]
        self._memory = comm.take_memory(name, begin + sum(strides))
        self.nbytes = self._memory.nbytes
        words = self._memory.buffer[:begin].cast("Q")
        self._control = [
            words[SLOT_WORDS * at : SLOT_WORDS * (at + 1)] for at in range(len(self._ranks))
        ]
        self.parity = 0
        self.place = self._ranks.index(comm.rank)
        self._mine = self._control[self.place]
        self._others = [*self._control[: self.place], *self._control[self.place + 1 :]]
        base = np.frombuffer(self._memory.buffer, dtype=np.uint8)
        slots = [
            np.ndarray(size, dtype, buffer=base, offset=offset)
            for size, offset in zip(sizes, accumulate(strides[:-1], initial=begin), strict=True)
        ]
        self.pair: tuple[list[Array], list[Array]] = slots[:count], slots[count : 2 * count]
        steps, odd = (strides[0], dtype.itemsize), begin + count * strides[0]
        self.stacked: tuple[Array, Array] = (
            np.ndarray((count, small), dtype, base, begin, steps),
            np.ndarray((count, small), dtype, base, odd, steps),
        )
        self.large = slots[2 * count :]

    def meet(self, kind: int) -> None:
        """Wait until all ranks are in this call too; what each wrote before, all see after.

        Host-blocking.

        Parameters
        ----------
        kind : int
            The call, an index of `CALLS`.

        Raises
        ------
        MismatchError
            On every rank, if they are not all in the same.
        """
        # Written for speed: a reduction of few elements is little more than this.
        epoch = self._epoch = self._epoch + 1
        word, value = epoch & 1, 2 * epoch + kind
        self._memory_barrier()
        self._mine[word] = value
        looks = 0
        for theirs in self._others:
            # `spin_until` inlined, as in a fence.
            while theirs[word] != value:
                looks += 1
                if looks > SPINS:
                    self.wait(value)
                elif not looks % self._spins_per_yield:
                    sched_yield()
        self._memory_barrier()

    def compiled(self, operation: str, count: int) -> Any:
        """Return the compiled `reduce` of the small slots, if there is one for that operation.

        Parameters
        ----------
        operation : str
            With the dtype of the numbers that an element consists of: ``"sum float64"``.
        count : int
            How many elements.
        """
        context = self._comm.context
        module = context.compiled
        if module is None or not module.can_reduce(operation):
            return None
        return module.Reduce(
            operation,
            np.ndarray,
            self._dtype,
            count,
            self.place,
            self._control,
            *self.pair,
            context.looks_per_yield,
        ).reduce

    def next_epoch(self) -> int:
        """Return the epoch of a meeting made by compiled code; `wait` where it takes long."""
        self._epoch += 1
        return self._epoch

    def publish_place(self, place: Location) -> None:
        """Say where this rank's field is, for `places` after the next meeting. Local."""
        begin = _PLACES + _PLACE_WORDS * ((self._epoch + 1) & 1)
        for at, word in enumerate(place, begin):
            self._mine[at] = word

    def places(self) -> list[Location]:
        """Return what each rank published before the last meeting. Local."""
        begin = _PLACES + _PLACE_WORDS * (self._epoch & 1)
        return [Location(*theirs[begin : begin + _PLACE_WORDS]) for theirs in self._control]

    def require_present(self) -> None:
        """Raise if a rank has left the node: its field may have been overwritten meanwhile."""
        self._memory_barrier()
        agreement = self._comm.context.agreement
        gone = [rank for rank in self._ranks if not agreement.is_here(self._comm.ranks_here[rank])]
        if gone:
            self._comm.wait(self._call(REDUCE), lambda: gone)  # raises, with the reason

    def close(self) -> None:
        """Give the memory back. Local, once no rank uses it."""
        self._control, self._others = [], []
        self._mine = memoryview(b"").cast("Q")
        self.pair, self.large = ([], []), []
        self.stacked = np.empty((0, 0)), np.empty((0, 0))
        self._memory.close()

    def wait(self, value: int) -> None:
        """Wait until all ranks are in the epoch of a word; raise if one of them made another call.

        Host-blocking.

        Parameters
        ----------
        value : int
            What this rank has written: twice the epoch, and the call.
        """
        word, least = value >> 1 & 1, value & ~1  # whichever call it is
        self._comm.wait(self._call(value), lambda: self._behind(word, least))
        self._memory_barrier()
        calls = [CALLS[theirs[word] & 1] for theirs in self._control]
        if len({*calls}) > 1:
            mine = CALLS[value & 1]
            made = dict(zip(self._ranks, calls, strict=True))
            raise MismatchError(
                f"{self._name}: {mine} failed: ranks made different calls: "
                + "; ".join(f"rank {rank}: {call}" for rank, call in made.items()),
                failures={rank: f"called {call}" for rank, call in made.items() if call != mine},
            )

    def refuse(self, *_: Any) -> NoReturn:
        """Raise since a handler of a signal has closed the plan in one of its calls."""
        raise ClosedError(f"{self._name} was closed while it was in a call")

    def _call(self, value: int) -> str:
        return f"{self._name}: {CALLS[value & 1]}"

    def _behind(self, word: int, least: int) -> list[int]:
        if not self._control:
            self.refuse()
        pairs = zip(self._ranks, self._control, strict=True)
        return [rank for rank, theirs in pairs if theirs[word] < least]

"""Slots of rows in host memory that two ranks share: the count travels beside the rows.

A pair has a header for each parity of the epoch and each direction, in memory of all ranks of the
node, and its slots in memory that the sender makes when it first has rows, or more than before. The
sender writes the rows, then their number, then the epoch. It overwrites them two epochs later: by
then it has seen the receiver's next epoch, which began after the receiver was done with these.
"""

from __future__ import annotations

import atexit
import logging
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.coordination.poll import spin_until
from mpishare.memory import shared

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.plans.comm import PlanComm
    from mpishare.rows.form import Form

    Array = np.ndarray[Any, Any]

log = logging.getLogger("mpishare.rows")

_EPOCH, _ROWS, _CAPACITY, _NAME = 0, 1, 2, 4  # words of a header
_WORDS = 16
_HEADER_NBYTES = 8 * _WORDS  # whole lines of the cache
# Files of this process that have a name, until a peer has opened them.
_named: set[str] = set()


@atexit.register
def _forget_all() -> None:
    while _named:
        _forget(_named.pop())


def _forget(name: str) -> None:
    shared.forget(name)
    _named.discard(name)


class Headers:
    """The headers of all pairs of this node's ranks. Collective to make, host-blocking."""

    def __init__(self, comm: PlanComm, name: str, form: Form) -> None:
        self._first, begin = {}, 0  # of the headers of what a rank receives
        for rank in comm.ranks_here:
            self._first[rank] = begin
            begin += 2 * form.nkeys[rank]
        self._memory = comm.take_memory(name, max(1, begin) * _HEADER_NBYTES)
        self.nbytes = self._memory.nbytes

    def of(self, receiver: int, place: int) -> list[memoryview[int]]:
        """Return those of a receiver's key, for even epochs and for odd ones."""
        words = self._memory.buffer.cast("Q")
        begins = (_WORDS * (self._first[receiver] + 2 * place + parity) for parity in (0, 1))
        return [words[begin : begin + _WORDS] for begin in begins]

    def close(self) -> None:
        """Give the memory back, once no rank uses it."""
        self._memory.close()


def views_of(form: Form, buffer: Any, capacity: int, begin: int = 0) -> list[Array]:
    """Return the columns of a slot for so many rows."""
    return [
        np.ndarray((capacity, *column.shape), column.dtype, buffer, begin + offset)
        for column, offset in zip(form.columns, form.offsets(capacity), strict=False)
    ]


def _map(form: Form, memory: shared.SharedMemory, capacity: int) -> list[list[Array]]:
    """Return the columns of both slots in shared memory."""
    half = form.offsets(capacity)[-1]
    base = np.frombuffer(memory.buffer, np.uint8)  # keeps the memory mapped as long as a view
    return [views_of(form, base, capacity, begin) for begin in (0, half)]


class Outgoing:
    """The rows that go to one peer on this node."""

    def __init__(self, form: Form, headers: list[memoryview[int]], barrier: Any, peer: str) -> None:
        self._form, self._headers, self._barrier, self._peer = form, headers, barrier, peer
        self._memory: shared.SharedMemory | None = None
        self._slots: list[list[Array]] = [[], []]
        self._name = ""  # of memory that the next header tells of
        self._told: dict[str, int] = {}  # names that the receiver may not have opened, by epoch
        self.capacity = self.nbytes = 0

    def reserve(self, count: int) -> None:
        """Make slots that have room, before anything is published."""
        if count <= self.capacity:
            return
        capacity = max(self._form.room, count + count // 2)
        if count > self._form.room:
            log.info("%d rows to %s: slots for %d from now on", count, self._peer, capacity)
        nbytes = 2 * self._form.offsets(capacity)[-1]
        memory = shared.create(nbytes)
        try:
            name = shared.publish(memory)
            _named.add(name)
        except BaseException:
            memory.close()
            raise
        if self._name:  # of a call that was refused
            _forget(self._name)
        self.close()
        memory.close_file()
        self._memory, self._name, self.nbytes, self.capacity = memory, name, nbytes, capacity
        self._slots = _map(self._form, memory, capacity)

    def slot(self, epoch: int) -> list[Array]:
        """Return the columns to which the rows of an epoch are copied."""
        return self._slots[epoch & 1]

    def send(self, count: int, epoch: int) -> None:
        """Announce the rows."""
        words = self._headers[epoch & 1]
        words[_ROWS], words[_CAPACITY] = count, 0
        if self._name:
            self._told[self._name] = epoch
            text = self._name.encode().ljust(8 * (_WORDS - _NAME), b"\0")
            self._name = ""
            words[_CAPACITY] = self.capacity
            words[_NAME:] = memoryview(text).cast("Q")
        self._barrier()
        words[_EPOCH] = epoch

    def end(self, epoch: int) -> None:
        """Note that all peers have announced an epoch: before that they ended the one before."""
        if self._told:
            self.forget(epoch)

    def forget(self, epoch: int = sys.maxsize) -> None:
        """Remove the names that were told before an epoch; default: all."""
        if self._name and epoch == sys.maxsize:
            _forget(self._name)
            self._name = ""
        for name in [name for name, told in self._told.items() if told < epoch]:
            _forget(name)
            del self._told[name]

    def close(self) -> None:
        """Unmap the slots, once no rank reads them."""
        self._slots = [[], []]
        if self._memory is not None:
            self._memory.close()
            self._memory = None


class Incoming:
    """The rows that come from one peer on this node."""

    def __init__(self, form: Form, headers: list[memoryview[int]], barrier: Any) -> None:
        self._form, self._headers, self._barrier = form, headers, barrier
        self._memory: shared.SharedMemory | None = None
        self._slots = [views_of(form, None, 0)] * 2
        self.count = 0
        self.columns: list[Array] = []

    def has_come(self, epoch: int) -> bool:
        """Whether the rows of an epoch are there."""
        return self._headers[epoch & 1][_EPOCH] >= epoch

    def spin(self, epoch: int, spins_per_yield: int) -> bool:
        """Wait for a moment; return whether the rows are there."""
        return spin_until(self._headers[epoch & 1], _EPOCH, epoch, spins_per_yield)

    def open(self, epoch: int) -> None:
        """Find the rows of an epoch that have come."""
        self._barrier()
        words = self._headers[epoch & 1]
        self.count, capacity = words[_ROWS], words[_CAPACITY]
        if capacity:
            name = bytes(words[_NAME:]).rstrip(b"\0").decode()
            memory = shared.attach(name, 2 * self._form.offsets(capacity)[-1])
            memory.close_file()
            self.close()
            self._memory, self._slots = memory, _map(self._form, memory, capacity)
        self.columns = self._slots[epoch & 1]

    def close(self) -> None:
        """Unmap the slots."""
        self._slots, self.columns = [[], []], []
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def move_rows(
    to: Sequence[Array],
    first: int,
    origin: Sequence[Array],
    begin: int,
    count: int,
    numbers: Any,
    nrows: int,  # noqa: ARG001
) -> bool:
    """Copy rows, from `begin` on or at `numbers`, to the rows from `first` on; C does the same.

    C returns whether the numbers are those of `nrows` rows.
    """
    for target, source in zip(to, origin, strict=True):
        if numbers is None:
            target[first : first + count] = source[begin : begin + count]
        else:
            target[first : first + count] = source[numbers]
    return True

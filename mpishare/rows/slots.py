"""Slots of rows in host memory that two ranks share: the count travels beside the rows.

A pair has a header for each parity of the epoch and each direction, in memory of all ranks of the
node, and its slots in memory that the sender makes when it first has rows, or more than before. The
sender writes the rows, then their number, then the epoch. It overwrites them two epochs later: by
then it has seen the receiver's next epoch, which began after the receiver was done with these.

Memory gets its name as it is announced, and the receiver removes it: the sender's program may have
ended by then. Where no receiver comes, the next node on this machine removes it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.coordination.poll import spin_until
from mpishare.memory import shared

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.plans.comm import PlanMemory
    from mpishare.rows.form import Form

    Array = np.ndarray[Any, Any]

log = logging.getLogger("mpishare.rows")

_EPOCH, _ROWS, _CAPACITY, _NAME = 0, 1, 2, 4  # words of a header
_WORDS = 16  # all: whole lines of the cache
_NAME_NBYTES = 8 * (_WORDS - _NAME)
HEADERS_NBYTES = 2 * 8 * _WORDS  # of a key


def headers_of(memory: PlanMemory, number: int) -> list[memoryview[int]]:
    """Return the headers of a key of the node, for even epochs and for odd ones."""
    words = memory.buffer.cast("Q")
    begins = (_WORDS * (2 * number + parity) for parity in (0, 1))
    return [words[begin : begin + _WORDS] for begin in begins]


def views_of(form: Form, buffer: Any, capacity: int, begin: int = 0) -> list[Array]:
    """Return the columns of a slot for so many rows."""
    return [
        np.ndarray((capacity, *column.shape), column.dtype, buffer, begin + offset)
        for column, offset in zip(form.columns, form.offsets(capacity), strict=False)
    ]


class _Slots:
    """Both slots of a direction, in shared memory once there were rows."""

    def __init__(self, form: Form, headers: list[memoryview[int]], barrier: Any) -> None:
        self._form, self._headers, self._barrier = form, headers, barrier
        self._memory: shared.SharedMemory | None = None
        self._slots = [views_of(form, None, 0)] * 2

    def _map(self, memory: shared.SharedMemory, capacity: int) -> None:
        self.close()
        self._memory = memory
        base, half = np.frombuffer(memory.buffer, np.uint8), self._form.offsets(capacity)[-1]
        self._slots = [views_of(self._form, base, capacity, begin) for begin in (0, half)]

    def close(self) -> None:
        """Unmap the slots, once no rank uses them."""
        self._slots = [[], []]
        if self._memory is not None:
            self._memory.close()
            self._memory = None


class Outgoing(_Slots):
    """The rows that go to one peer on this node."""

    def __init__(self, form: Form, headers: list[memoryview[int]], barrier: Any, peer: str) -> None:
        super().__init__(form, headers, barrier)
        self._peer = peer
        self._is_new = False  # memory of which no header has told
        self._capacity = self.nbytes = 0

    def reserve(self, count: int) -> None:
        """Make slots that have room, before anything is published."""
        if count <= self._capacity:
            return
        capacity = max(self._form.room, count + count // 2)
        if count > self._form.room:
            log.info("%d rows to %s: slots for %d from now on", count, self._peer, capacity)
        nbytes = 2 * self._form.offsets(capacity)[-1]
        self._map(shared.create(nbytes), capacity)
        self._is_new, self.nbytes, self._capacity = True, nbytes, capacity

    def slot(self, epoch: int) -> list[Array]:
        """Return the columns to which the rows of an epoch are copied."""
        return self._slots[epoch & 1]

    def send(self, count: int, epoch: int) -> None:
        """Announce the rows."""
        words = self._headers[epoch & 1]
        words[_ROWS], words[_CAPACITY] = count, 0
        if self._is_new and self._memory is not None:
            name = shared.publish(self._memory)
            self._memory.close_file()
            words[_CAPACITY] = self._capacity
            words[_NAME:] = memoryview(name.encode().ljust(_NAME_NBYTES, b"\0")).cast("Q")
            self._is_new = False
        self._barrier()
        words[_EPOCH] = epoch

    def is_sent(self) -> bool:
        """Whether nothing is left to do: it was sent by stores."""
        return True


class Incoming(_Slots):
    """The rows that come from one peer on this node."""

    count = 0
    columns: Sequence[Array] = ()

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
            shared.forget(name)
            self._map(memory, capacity)
        self.columns = self._slots[epoch & 1]

    def close(self) -> None:
        """Unmap the slots."""
        self.columns = ()
        super().close()


def move_rows(
    to: Sequence[Array],
    first: int | Array,
    origin: Sequence[Array],
    begin: int | Array,
    count: int,
    nrows: int,
) -> bool:
    """Copy rows to those of other columns: both from one row on, or of some numbers. C does it too.

    Return whether the numbers are those of `nrows` rows: else nothing is copied.
    """
    places: list[Any] = []
    for each in (first, begin):
        if isinstance(each, int):
            places.append(slice(each, each + count))
            continue
        places.append(rows := each[:count])
        if count and rows.view(f"u{rows.itemsize}").max() >= nrows:
            return False
    into, rows = places
    for target, source in zip(to, origin, strict=True):
        target[into] = source[rows]
    return True

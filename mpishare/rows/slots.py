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
    Headers = Sequence[memoryview[int]]
    """For even epochs and for odd ones."""

log = logging.getLogger("mpishare.rows")

_EPOCH, _ROWS, _CAPACITY, _NAME = 0, 1, 2, 4  # words of a header
_WORDS = 16  # all: whole lines of the cache
_NAME_NBYTES = 8 * (_WORDS - _NAME)
HEADERS_NBYTES = 2 * 8 * _WORDS  # of a key


def headers_of(memory: PlanMemory, number: int) -> Headers:
    """Return the headers of a key of the node."""
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

    def __init__(self, form: Form) -> None:
        self._form = form
        self.memory: shared.SharedMemory | None = None
        self.of_parity = [views_of(form, None, 0)] * 2

    def map(self, memory: shared.SharedMemory, capacity: int) -> None:
        self.close()
        self.memory = memory
        base, half = np.frombuffer(memory.buffer, np.uint8), self._form.offsets(capacity)[-1]
        self.of_parity = [views_of(self._form, base, capacity, begin) for begin in (0, half)]

    def close(self) -> None:
        self.of_parity = [[], []]
        if self.memory is not None:
            self.memory.close()
            self.memory = None


class SlotPair:
    """The rows sent to one peer on this node, and those received from it.

    `there` are the peer's headers for what goes, `here` this rank's for what comes.
    """

    nbytes = 0  # of the slots that this rank has made
    count = 0  # of the rows that came, and these
    columns: Sequence[Array] = ()

    def __init__(self, form: Form, there: Headers, here: Headers, barrier: Any, peer: str) -> None:
        self._form, self._there, self._here = form, there, here
        self._barrier, self._peer = barrier, peer
        self._out, self._in = _Slots(form), _Slots(form)
        self._capacity = 0  # of what goes
        self._is_new = False  # memory of which no header has told

    def reserve(self, count: int) -> None:
        """Make slots that have room, before anything is published."""
        if count <= self._capacity:
            return
        capacity = max(self._form.room, count + count // 2)
        if count > self._form.room:
            log.info("%d rows to %s: slots for %d from now on", count, self._peer, capacity)
        nbytes = 2 * self._form.offsets(capacity)[-1]
        self._out.map(shared.create(nbytes), capacity)
        self._is_new, self.nbytes, self._capacity = True, nbytes, capacity

    def slot(self, epoch: int) -> list[Array]:
        """Return the columns to which the rows of an epoch are copied."""
        return self._out.of_parity[epoch & 1]

    def send(self, count: int, epoch: int) -> None:
        """Announce the rows."""
        words = self._there[epoch & 1]
        words[_ROWS], words[_CAPACITY] = count, 0
        if self._is_new and self._out.memory is not None:
            name = shared.publish(self._out.memory)
            self._out.memory.close_file()
            words[_CAPACITY] = self._capacity
            words[_NAME:] = memoryview(name.encode().ljust(_NAME_NBYTES, b"\0")).cast("Q")
            self._is_new = False
        self._barrier()
        words[_EPOCH] = epoch

    def is_over(self, epoch: int) -> bool:
        """Whether the rows of an epoch are here, and those of this rank are sent: by stores."""
        return self._here[epoch & 1][_EPOCH] >= epoch

    def spin(self, epoch: int, spins_per_yield: int) -> bool:
        """Wait for a moment; return whether the rows are there."""
        return spin_until(self._here[epoch & 1], _EPOCH, epoch, spins_per_yield)

    def open(self, epoch: int) -> None:
        """Find the rows of an epoch that have come."""
        self._barrier()
        words = self._here[epoch & 1]
        self.count, capacity = words[_ROWS], words[_CAPACITY]
        if capacity:
            name = bytes(words[_NAME:]).rstrip(b"\0").decode()
            memory = shared.attach(name, 2 * self._form.offsets(capacity)[-1])
            memory.close_file()
            shared.forget(name)
            self._in.map(memory, capacity)
        self.columns = self._in.of_parity[epoch & 1]

    def close(self) -> None:
        """Unmap the slots, once no rank uses them."""
        self.columns = ()
        self._out.close()
        self._in.close()


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

"""The control block: shared memory through which the ranks of a node coordinate.

One block per node, in slots of 128 bytes with one writer each: which ranks are alive, which rank
waits for which, a mailbox per rank for agreement, and the counters that order streams. Everything
is an aligned 8-byte item, read and written whole. Where the processor reorders stores or loads, as
aarch64 does, a full memory barrier stands before the store that publishes and after the load that
saw it.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import time
from enum import IntEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from mpishare.coordination import robust_futex
from mpishare.coordination.counters import SLOT_WORDS, CounterPool, whole_slots
from mpishare.coordination.poll import yield_core
from mpishare.native import memory_barrier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.memory.shared import SharedMemory

# Bytes that a rank can publish in one round of agreement.
MAILBOX_NBYTES = 4096

# Of each rank: single words, with the marks amid them, three texts behind their versions and
# lengths, and the mail.
_STATE, _LIFE, _LOOKED, _ASKED = 0, 2, 3, 8
_DEPARTURE, _WAIT, _WHERE = SLOT_WORDS, 512, 640  # their first words
_MAIL = 768
_TEXT_NBYTES = {
    place: 8 * (end - place - 2) for place, end in pairwise((_DEPARTURE, _WAIT, _WHERE, _MAIL))
}
_MAX_TEXT, _MAX_MISSING, _MAX_AWAITED = 500, 64, 64
_MAX_CALL_NBYTES = 500  # as JSON
_TRIES = 1000  # to read a text that changes; a rank may have died while writing it
_BOX_WORDS = MAILBOX_NBYTES // 8 + 1  # behind a slot of the mail's number and of meetings
_RANK_WORDS = whole_slots(_MAIL + SLOT_WORDS + 2 * _BOX_WORDS)
_POOL_WORDS = 1 << 14
_PLAN_WORDS = 1 << 13  # 64 KiB: some plans of small faces
_LOCKS_AT = 1 << 40  # locks need no bytes: far beyond the end of any block


class State(IntEnum):
    PRESENT = 0
    CLOSED = 1
    # By an exception, whose text is in the slot of the rank.
    LEFT = 2
    # The process ended without closing the node.
    EXITED = 3


class Mark(IntEnum):
    """What a rank publishes once, and for good: the number of its word."""

    # All its output is out, and it only waits to abort the job.
    ABORTING = 5
    # It has seen another rank dead.
    SAW_DEATH = 6
    # It releases counters: the end of a wait may then be no signal.
    BROKEN = 7


class Status(NamedTuple):
    """The wait of a rank; times by the clock that the processes of a machine share."""

    call: str
    awaited: tuple[int, ...]
    begun_ns: int  # when it began to wait for just these ranks
    looked_ns: int  # when it last found that it still waits


def fitting(call: str) -> str:
    """Return as much of the name of a call, or of a place, as its text has room for."""
    while len(json.dumps(call)) > _MAX_CALL_NBYTES:
        call = call[: len(call) // 2]
    return call


class Departure(NamedTuple):
    """How a rank left a node by an exception."""

    text: str
    missing: tuple[int, ...] = ()  # ranks whose absence is the reason
    is_cause: bool = True  # False where it left only because another rank failed


def _cut(text: str) -> str:
    """Return as much of the text of an error as there is room for."""
    return text[:_MAX_TEXT].encode(errors="replace")[: 2 * _MAX_TEXT].decode(errors="ignore")


class ControlBlock:
    """One rank's view of its node's control block.

    `memory` is zeroed and the same on every rank, of at least `nbytes_for` bytes.
    """

    def __init__(self, memory: SharedMemory, rank: int, size: int) -> None:
        self.memory, self.rank, self.size = memory, rank, size
        # Counters, which are released after a failure, and memory of plans, which is not.
        self.pool, self.plan_memory = CounterPool(), CounterPool()
        self.words = memoryview(memory.buffer).cast("Q")
        self._bytes = memoryview(memory.buffer)
        self.sync = memory_barrier()
        self.pool_start = size * _RANK_WORDS
        # Single words, each by rank.
        self._each = [self.words[word : self.pool_start : _RANK_WORDS] for word in range(9)]
        self._waits: dict[int, tuple[int, Any]] = {}  # as read last, by rank
        self._answered_ns = 0
        self._pid = os.getpid()
        self.is_open = True

    @staticmethod
    def nbytes_for(size: int) -> int:
        return 8 * (size * _RANK_WORDS + _POOL_WORDS + _PLAN_WORDS)

    def fill_pools(self, address: int) -> None:
        """Give the words behind those of the ranks to the pools.

        `address` is that of the block on this rank's GPU; 0 on the host backend.
        """
        start = self.pool_start
        for pool, count in ((self.pool, _POOL_WORDS), (self.plan_memory, _PLAN_WORDS)):
            pool.add(self.words[start : start + count], address + 8 * start if address else 0)
            start += count

    def close(self) -> None:
        """Unmap the block and release this rank's lock."""
        self.is_open = False
        self.pool, self.plan_memory = CounterPool(), CounterPool()
        for view in (*self._each, self.words, self._bytes):
            view.release()
        self.memory.close()

    @property
    def is_mine(self) -> bool:
        """Whether this process made the view, and is not a fork of it."""
        return os.getpid() == self._pid

    # --- liveness of ranks: a lock that the operating system releases when the process ends

    def lock(self) -> None:
        """Take this rank's lock, so that the others can see the end of its process."""
        self.memory.lock(_LOCKS_AT + self.rank)

    def is_running(self, rank: int) -> bool:
        return rank == self.rank or self.pid(rank) is not None

    def pid(self, rank: int) -> int | None:
        """Return the process of another rank, by its number here; None once it has ended.

        The number means nothing where this PID namespace does not see that process.
        """
        at = _LOCKS_AT + rank
        question = struct.pack("hh4xqqi4x", fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0)
        answer = fcntl.fcntl(self.memory.fd, fcntl.F_GETLK, question)
        kind, *_, pid = struct.unpack("hh4xqqi4x", answer)
        return None if kind == fcntl.F_UNLCK else pid

    def life_address(self, rank: int) -> int:
        """Return the address of the word that a rank's watchdog holds; see `robust_futex`."""
        return self.memory.address + 8 * (rank * _RANK_WORDS + _LIFE)

    def is_being_killed(self, rank: int) -> bool:
        """Whether the kernel has begun to end the process of that rank, which was in the node.

        True some milliseconds before the lock is released, and without a system call. False proves
        nothing.
        """
        is_marked = self._each[_LIFE][rank] & robust_futex.DIED
        return bool(is_marked) and self.state(rank) == State.PRESENT

    # --- marks

    def mark(self, mark: Mark) -> None:
        """Publish a mark of this rank, before all that it does from here on."""
        self._each[mark][self.rank] = 1
        self.sync()

    def has_mark(self, mark: Mark, rank: int) -> bool:
        return bool(self._each[mark][rank])

    def has_any(self, mark: Mark) -> bool:
        """Whether any rank has published a mark."""
        self.sync()
        return any(self._each[mark].tolist())

    def is_past(self, mark: Mark, rank: int) -> bool:
        """Whether that rank has published a mark, or its process has ended."""
        return self.has_mark(mark, rank) or not self.is_running(rank)

    # --- departures of ranks from the node

    def state(self, rank: int) -> State:
        value = self._each[_STATE][rank]
        self.sync()
        return State(value)

    def state_address(self, rank: int) -> int:
        """Return the address of the word with the state of that rank, 0 while it is present."""
        return self.memory.address + 8 * (rank * _RANK_WORDS + _STATE)

    def is_here(self, rank: int) -> bool:
        """Whether that rank has not left the node, and its process runs."""
        return self.state(rank) == State.PRESENT and self.is_running(rank)

    def are_all_present(self) -> bool:
        """Whether no rank has left the node: some microseconds, of any size."""
        self.sync()
        return not any(self._each[_STATE].tolist())

    def depart(self, state: State, departure: Departure | None = None) -> None:
        """Publish how this rank leaves, unless the node is closed; the first reason stands."""
        if self.is_open and self.is_mine and self._each[_STATE][self.rank] == State.PRESENT:
            if departure is not None:
                missing = departure.missing[:_MAX_MISSING]
                self._publish(_DEPARTURE, [_cut(departure.text), missing, departure.is_cause])
            self._each[_STATE][self.rank] = state
            self.sync()  # before the program overwrites memory that others may be reading

    def departure(self, rank: int) -> Departure | None:
        """Return how that rank left by an exception; None if it did not."""
        found = None
        if self.state(rank) == State.LEFT:
            _, found = self._published(rank, _DEPARTURE)
        return found and Departure(found[0], tuple(found[1]), *found[2:])

    def departures(self) -> dict[int, Departure]:
        """Return how ranks left by an exception."""
        return {rank: left for rank in range(self.size) if (left := self.departure(rank))}

    # --- the wait-for graph: the call in which each rank waits, and for which ranks

    def begin_wait(self, call: str, awaited: Sequence[int]) -> None:
        # A list cut short does no harm: a cycle through the omitted ranks ends by the deadline.
        awaited = [*awaited[:_MAX_AWAITED]]
        self._publish(_WAIT, [fitting(call), awaited, time.monotonic_ns()])

    def look(self, now_ns: int) -> None:
        """Publish that this rank still waits, as it has checked since a time."""
        self._each[_LOOKED][self.rank] = now_ns

    def end_wait(self) -> None:
        self._publish(_WAIT, None)

    def status(self, rank: int) -> Status | None:
        """Return the published wait of that rank; None without one, or if it cannot be read."""
        looked_ns = self._each[_LOOKED][rank]
        self.sync()  # this first: behind the version it could be that of a later wait
        # Of many ranks all look at the waits of all others, again and again: each is parsed once.
        known = self._waits.get(rank)
        if known is None or known[0] != self.words[rank * _RANK_WORDS + _WAIT]:
            known = self._waits[rank] = self._published(rank, _WAIT)
        wait = known[1]
        return wait and Status(wait[0], tuple(wait[1]), wait[2], looked_ns)

    # --- where ranks are: a question to all, and the answer of each; see `where`

    def ask(self) -> int:
        """Ask all ranks where they are; return the time of the question."""
        now_ns = self._each[_ASKED][self.rank] = time.monotonic_ns()
        self.sync()
        return now_ns

    def is_asked(self) -> bool:
        """Whether a rank has asked since this one's last answer."""
        self.sync()
        return max(self._each[_ASKED].tolist()) > self._answered_ns

    def answer(self, place: Callable[[], str]) -> None:
        """Publish where this rank is, as found from now on."""
        self._answered_ns = time.monotonic_ns()
        self._publish(_WHERE, [self._answered_ns, fitting(place())])

    def answer_of(self, rank: int, since_ns: int) -> str | None:
        """Return where that rank is; None if it has published no answer since a time."""
        _, found = self._published(rank, _WHERE)
        return str(found[1]) if found and found[0] >= since_ns else None

    # --- texts of JSON, each with a version that is odd while it is being written

    def _publish(self, place: int, value: Any) -> None:
        """Replace a text of this rank, by a value that fits."""
        at = self.rank * _RANK_WORDS + place
        data = json.dumps(value).encode()[: _TEXT_NBYTES[place]]
        # It is odd already where an exception out of a signal handler cut off the last text.
        version = self.words[at] = self.words[at] | 1
        self.sync()
        self.words[at + 1] = len(data)
        self._bytes[8 * (at + 2) : 8 * (at + 2) + len(data)] = data
        self.sync()
        self.words[at] = version + 1

    def _published(self, rank: int, place: int) -> tuple[int, Any]:
        """Return the version of a text and its value; None if there is none, or it changes."""
        at = rank * _RANK_WORDS + place
        for _ in range(_TRIES):
            version = self.words[at]
            self.sync()
            nbytes = min(self.words[at + 1], _TEXT_NBYTES[place])
            text = bytes(self._bytes[8 * (at + 2) : 8 * (at + 2) + nbytes])
            self.sync()
            if version % 2 == 0 and self.words[at] == version:
                return version, json.loads(text or "null")
            yield_core()  # it is being written
        return -1, None

    # --- mailboxes: double-buffered, so that a fast rank never overwrites mail still being read

    def post_mail(self, number: int, total: int, data: bytes) -> None:
        """Publish round `number` of this rank: `data` is a part of `total` bytes."""
        at = self.rank * _RANK_WORDS + _MAIL
        box = at + SLOT_WORDS + (number % 2) * _BOX_WORDS
        self.words[box] = total
        self._bytes[8 * (box + 1) : 8 * (box + 1) + len(data)] = data
        self.sync()
        self.words[at] = number

    def has_mail(self, rank: int, number: int) -> bool:
        return self.words[rank * _RANK_WORDS + _MAIL] >= number

    def read_mail(self, rank: int, number: int, start: int) -> tuple[int, bytes]:
        """Return the total length and the part from `start` on, after `has_mail`."""
        self.sync()
        box = rank * _RANK_WORDS + _MAIL + SLOT_WORDS + (number % 2) * _BOX_WORDS
        total = self.words[box]
        length = max(0, min(MAILBOX_NBYTES, total - start))
        return total, bytes(self._bytes[8 * (box + 1) : 8 * (box + 1) + length])

    def meeting_slot(self, rank: int, number: int) -> int:
        """Return the index of a rank's word for a round of meetings, behind the mail's number."""
        return rank * _RANK_WORDS + _MAIL + 1 + number

    @staticmethod
    def rank_of_slot(at: int) -> int:
        return at // _RANK_WORDS

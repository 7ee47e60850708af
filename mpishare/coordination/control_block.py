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
import platform
import struct
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from mpishare.coordination import robust_futex
from mpishare.coordination.counters import SLOT_WORDS, CounterPool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi4py import MPI

    from mpishare.memory.shared import SharedMemory

T = TypeVar("T")

# Bytes that a rank can publish in one round of agreement.
MAILBOX_NBYTES = 4096

# Processors that show stores in program order and load in order (Intel Software Developer's Manual,
# volume 3, 9.2.2).
ORDERED_MACHINES = ("x86_64", "AMD64")

_STATE_WORDS = 512
_MAX_TEXT, _MAX_MISSING = 500, 64
_TEXT_WORDS = _STATE_WORDS - 7  # behind the state; then six words of their own:
_EXITS, _ENDING, _LIFE, _SAW_DEATH, _ABORTING, _BROKEN = range(_STATE_WORDS - 6, _STATE_WORDS)
_EXIT = 1 << 32  # one exit; below it the version of the text
_STATUS_WORDS = 128
_TRIES = 1000  # to read a text that changes; a rank may have died while writing it
_MAILBOX_WORDS = SLOT_WORDS + 2 * (MAILBOX_NBYTES // 8 + 1)
_MAILBOX_STRIDE = -(-_MAILBOX_WORDS // SLOT_WORDS) * SLOT_WORDS
_RANK_WORDS = _STATE_WORDS + _STATUS_WORDS + _MAILBOX_STRIDE
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


class Status(NamedTuple):
    version: int
    looks: int
    call: str
    awaited: tuple[int, ...]


class MemoryBarrier:
    """A full memory barrier, where the processor needs one.

    `MPI.Win.Sync` is the only portable one in Python: on a window of this process alone it is
    local, about 50 ns, and can be freed at any time.
    """

    def __init__(self) -> None:
        from mpi4py import MPI

        self._is_finalized = MPI.Is_finalized
        self._window: MPI.Win | None = None
        self.sync: Callable[[], None] = _nothing
        if platform.machine() not in ORDERED_MACHINES:
            self._window = MPI.Win.Allocate_shared(8, comm=MPI.COMM_SELF)
            self._window.Lock_all()
            self.sync = self._window.Sync

    def close(self) -> None:
        """Free the window, unless MPI is finalized."""
        if self._window is not None and not self._is_finalized():
            self._window.Unlock_all()
            self._window.Free()
        self._window = None


def _nothing() -> None:
    pass


class Departure(NamedTuple):
    """How a rank left a node, or the block of one of its objects, by an exception."""

    text: str
    missing: tuple[int, ...]  # ranks whose absence is the reason
    is_cause: bool  # False where it left only because another rank failed
    leaves_messages: bool  # of a collective that it began, and others may never answer

    def pack(self, max_nbytes: int) -> str:
        """Return the text that `unpack` reads, cut so that it remains valid JSON."""
        text = self.text[:_MAX_TEXT].encode(errors="replace").decode()
        while True:
            packed = json.dumps([text, self.missing[:_MAX_MISSING], *self[2:]])
            if len(packed) <= max_nbytes:
                return packed
            text = text[: len(text) // 2]  # twelve bytes a character where they are escaped

    @classmethod
    def unpack(cls, packed: str) -> Departure:
        text, missing, is_cause, leaves_messages = json.loads(packed)
        return cls(text, tuple(missing), is_cause, leaves_messages)


class ControlBlock:
    """One rank's view of its node's control block.

    `memory` is zeroed and the same on every rank, of at least `nbytes_for` bytes.
    """

    def __init__(self, memory: SharedMemory, rank: int, size: int) -> None:
        self.memory = memory
        self.rank = rank
        self.size = size
        # Counters, which are released after a failure.
        self.pool = CounterPool()
        # Memory of plans, which is not.
        self.plan_memory = CounterPool()
        self.words = memoryview(memory.buffer).cast("Q")
        self._bytes = memoryview(memory.buffer)
        self.barrier = MemoryBarrier()
        self.sync = self.barrier.sync
        self.pool_start = size * _RANK_WORDS
        ranks = slice(0, self.pool_start, _RANK_WORDS)
        self._states, self._saw_death = self.words[ranks], self.words[_SAW_DEATH:][ranks]
        self._exits = self.words[_EXITS:][ranks]
        self._pid = os.getpid()
        self.is_open = True
        # Whether this rank is in a collective by messages of a communicator of mpishare's.
        self.is_in_messages = False

    @staticmethod
    def nbytes_for(size: int) -> int:
        return 8 * (size * _RANK_WORDS + _POOL_WORDS + _PLAN_WORDS)

    def fill_pools(self, address: int) -> None:
        """Give the words behind those of the ranks to the pools.

        `address` is that of the block on this rank's GPU; 0 on the host backend.
        """
        start = self.pool_start
        for pool, end in (
            (self.pool, start + _POOL_WORDS),
            (self.plan_memory, start + _POOL_WORDS + _PLAN_WORDS),
        ):
            pool.add(self.words[start:end], address + 8 * start if address else 0)
            start = end

    # --- liveness of ranks: a lock that the operating system releases when the process ends

    def lock(self) -> None:
        """Take this rank's lock, so that the others can see the end of its process.

        A POSIX record lock, since a forked child does not inherit it. Closing any descriptor of the
        file would release it, so no other descriptor is opened after this.
        """
        fcntl.lockf(self.memory.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _LOCKS_AT + self.rank)

    def is_running(self, rank: int) -> bool:
        if rank == self.rank:
            return True
        question = struct.pack("hh4xqqi4x", fcntl.F_WRLCK, os.SEEK_SET, _LOCKS_AT + rank, 1, 0)
        answer = fcntl.fcntl(self.memory.fd, fcntl.F_GETLK, question)
        return bool(struct.unpack("hh4xqqi4x", answer)[0] != fcntl.F_UNLCK)

    def life_address(self, rank: int) -> int:
        """Return the address of the word that a rank's watchdog holds; see `robust_futex`."""
        return self.memory.address + 8 * (rank * _RANK_WORDS + _LIFE)

    def is_being_killed(self, rank: int) -> bool:
        """Whether the kernel has begun to end the process of that rank, which was in the node.

        True some milliseconds before the lock is released, and without a system call. False proves
        nothing.
        """
        is_marked = self.words[rank * _RANK_WORDS + _LIFE] & robust_futex.DIED
        return bool(is_marked) and self.state(rank) == State.PRESENT

    @property
    def is_mine(self) -> bool:
        """Whether this process made the view, and is not a fork of it."""
        return os.getpid() == self._pid

    def state(self, rank: int) -> State:
        value = self.words[rank * _RANK_WORDS]
        self.sync()
        return State(value)

    def state_address(self, rank: int) -> int:
        """Return the address of the word with the state of that rank, 0 while it is present."""
        return self.memory.address + 8 * rank * _RANK_WORDS

    def lock_of(self, rank: int) -> tuple[int, int]:
        """Return the open file and the offset where that rank's process holds a lock."""
        return self.memory.fd, _LOCKS_AT + rank

    def is_here(self, rank: int) -> bool:
        """Whether that rank has not left the node, and its process runs."""
        return self.state(rank) == State.PRESENT and self.is_running(rank)

    def are_all_present(self) -> bool:
        """Whether no rank has left the node or is outside: some microseconds, of any size."""
        self.sync()
        exits = self._exits.tolist()
        return not any(self._states.tolist()) and max(exits) // _EXIT <= exits[self.rank] // _EXIT

    def is_outside(self, rank: int) -> bool:
        """Whether that rank has left an object's block by an exception, and this one has not yet.

        Exits are counted and compared, so that nobody is outside once all ranks have left the block
        in this way.
        """
        self.sync()
        return self._exits[rank] // _EXIT > self._exits[self.rank] // _EXIT

    @property
    def is_ahead(self) -> bool:
        """Whether this rank is outside for another one."""
        self.sync()
        exits = self._exits.tolist()
        return min(exits) // _EXIT < exits[self.rank] // _EXIT

    def has_gone(self, rank: int) -> bool:
        """Whether that rank has left the node, in any way, or is outside."""
        return self.state(rank) != State.PRESENT or self.is_outside(rank)

    def say_death(self) -> bool:
        """Publish that this rank has seen another one dead; return whether it is the first to."""
        is_first = not self.is_death_said()
        self.words[self.rank * _RANK_WORDS + _SAW_DEATH] = 1
        return is_first

    def is_death_said(self) -> bool:
        """Whether any rank has seen another one dead."""
        return any(self._saw_death.tolist())

    def depart(
        self,
        state: State,
        text: str = "",
        missing: Sequence[int] = (),
        *,
        is_cause: bool = True,
    ) -> None:
        """Publish how this rank leaves, unless the node is closed; the first reason stands.

        `missing` are the ranks whose absence is the reason. `is_cause` is False where this rank
        leaves only because another one failed.
        """
        if self._is_mine_and_present():
            if state == State.LEFT:
                self._write_departure(Departure(text, (*missing,), is_cause, self.is_in_messages))
            self.words[self.rank * _RANK_WORDS] = state
            self.sync()  # before the program overwrites memory that others may be reading

    def step_out(self, text: str, *, is_cause: bool) -> None:
        """Publish that this rank has left the block of an object of the node by an exception."""
        if self._is_mine_and_present():
            self._write_departure(Departure(text, (), is_cause, leaves_messages=False))
            self._exits[self.rank] += _EXIT
            self.sync()

    def _is_mine_and_present(self) -> bool:
        return (
            self.is_open and self.is_mine and self.words[self.rank * _RANK_WORDS] == State.PRESENT
        )

    def _write_departure(self, why: Departure) -> None:
        at = self.rank * _RANK_WORDS
        self._exits[self.rank] += 1  # odd: the text is being written
        self.sync()
        self._write_text(at + 1, _TEXT_WORDS, why.pack(8 * (_TEXT_WORDS - 1)))
        self.sync()
        self._exits[self.rank] += 1

    def mark_broken(self) -> None:
        """Publish, before any counter is released, that this rank releases counters."""
        self.words[self.rank * _RANK_WORDS + _BROKEN] = 1
        self.sync()

    def mark_ending(self) -> None:
        """Publish that the process of this rank ends and makes no further call."""
        self.words[self.rank * _RANK_WORDS + _ENDING] = 1

    def is_ending(self, rank: int) -> bool:
        """Whether the process of that rank ends or has ended."""
        return bool(self.words[rank * _RANK_WORDS + _ENDING]) or not self.is_running(rank)

    def mark_aborting(self) -> None:
        """Publish that all output of this rank is out, and that it only waits to abort the job."""
        self.words[self.rank * _RANK_WORDS + _ABORTING] = 1

    def is_aborting(self, rank: int) -> bool:
        return bool(self.words[rank * _RANK_WORDS + _ABORTING]) and self.is_running(rank)

    def is_silent(self, rank: int) -> bool:
        """Whether that rank writes no more output."""
        return not self.is_running(rank) or self.is_aborting(rank)

    def is_broken(self) -> bool:
        """Whether any rank releases counters: the end of a wait may then be no signal."""
        self.sync()
        return any(self.words[r * _RANK_WORDS + _BROKEN] for r in range(self.size))

    def departures(self) -> dict[int, Departure]:
        """Return how ranks left by an exception, of all that did or are outside."""
        found = {rank: self.departure(rank) for rank in range(self.size)}
        return {rank: each for rank, each in found.items() if each is not None}

    def has_left(self, rank: int) -> bool:
        """Whether that rank has left by an exception: the node, or a block of an object."""
        return self.state(rank) == State.LEFT or self.is_outside(rank)

    def departure(self, rank: int) -> Departure | None:
        """Return how that rank left by an exception; None if it did not."""
        if not self.has_left(rank):
            return None
        text = self._read_published(
            rank * _RANK_WORDS + _EXITS, lambda: self._read_text(rank * _RANK_WORDS + 1)
        )
        return None if text is None else Departure.unpack(text[1])

    # --- the wait-for graph: the call in which each rank waits, and for which ranks

    def begin_wait(self, call: str, awaited: Sequence[int]) -> None:
        at = self.rank * _RANK_WORDS + _STATE_WORDS
        self.words[at] += 1  # odd: the text is being written
        self.sync()
        # A list cut short does no harm: a cycle through the omitted ranks ends by the deadline.
        self._write_text(at + 1, _STATUS_WORDS - 2, json.dumps([call, list(awaited)[:64]]))
        self.sync()
        self.words[at] += 1

    def look(self) -> None:
        """Publish that this rank has checked again and still waits."""
        self.words[self.rank * _RANK_WORDS + _STATE_WORDS + _STATUS_WORDS - 1] += 1

    def end_wait(self) -> None:
        at = self.rank * _RANK_WORDS + _STATE_WORDS
        self.words[at + 1] = 0
        self.sync()
        self.words[at] += 2

    def status(self, rank: int) -> Status | None:
        """Return the published wait of that rank; None without one, or if it cannot be read."""
        at = rank * _RANK_WORDS + _STATE_WORDS
        found = self._read_published(
            at, lambda: (self._read_text(at + 1), self.words[at + _STATUS_WORDS - 1])
        )
        if found is None or not found[1][0]:
            return None
        version, (text, looks) = found
        call, awaited = json.loads(text)
        return Status(version, looks, call, tuple(awaited))

    def _read_published(self, at: int, read: Callable[[], T]) -> tuple[int, T] | None:
        """Return a version, counted at `at`, and what was read of it; None if it keeps changing."""
        for _ in range(_TRIES):
            version = self.words[at]
            self.sync()
            found = read()
            self.sync()
            if version % 2 == 0 and self.words[at] == version:
                return version, found
            os.sched_yield()  # it is being written
        return None

    # --- mailboxes: double-buffered, so that a fast rank never overwrites mail still being read

    def post_mail(self, number: int, total: int, data: bytes) -> None:
        """Publish round `number` of this rank: `data` is a part of `total` bytes."""
        at = self.rank * _RANK_WORDS + _STATE_WORDS + _STATUS_WORDS
        box = at + SLOT_WORDS + (number % 2) * (MAILBOX_NBYTES // 8 + 1)
        self.words[box] = total
        self._bytes[8 * (box + 1) : 8 * (box + 1) + len(data)] = data
        self.sync()
        self.words[at] = number

    def has_mail(self, rank: int, number: int) -> bool:
        return self.words[rank * _RANK_WORDS + _STATE_WORDS + _STATUS_WORDS] >= number

    def meeting_slot(self, rank: int, parity: int, number: int) -> int:
        """Return the index of a rank's word for one round of a meeting.

        Two sets of words, behind the mail's number, since a rank may be in the next meeting while
        another one still reads its words of this one.
        """
        at = rank * _RANK_WORDS + _STATE_WORDS + _STATUS_WORDS
        return at + 1 + parity * (SLOT_WORDS // 2 - 1) + number

    @staticmethod
    def rank_of_slot(at: int) -> int:
        return at // _RANK_WORDS

    def read_mail(self, rank: int, number: int, start: int) -> tuple[int, bytes]:
        """Return the total length and the part from `start` on, after `has_mail`."""
        self.sync()
        at = rank * _RANK_WORDS + _STATE_WORDS + _STATUS_WORDS
        box = at + SLOT_WORDS + (number % 2) * (MAILBOX_NBYTES // 8 + 1)
        total = self.words[box]
        length = max(0, min(MAILBOX_NBYTES, total - start))
        return total, bytes(self._bytes[8 * (box + 1) : 8 * (box + 1) + length])

    def close(self) -> None:
        """Unmap the block and release this rank's lock."""
        self.is_open = False
        self.pool = CounterPool()
        self.plan_memory = CounterPool()
        for view in (self._states, self._saw_death, self._exits, self.words):
            view.release()
        self._bytes.release()
        self.memory.close()
        self.barrier.close()

    def _write_text(self, at: int, nwords: int, text: str) -> None:
        data = text.encode(errors="replace")[: 8 * (nwords - 1)]
        self._bytes[8 * (at + 1) : 8 * (at + 1) + len(data)] = data
        self.words[at] = len(data)

    def _read_text(self, at: int) -> str:
        length = min(self.words[at], 8 * _STATE_WORDS)
        return bytes(self._bytes[8 * (at + 1) : 8 * (at + 1) + length]).decode(errors="replace")

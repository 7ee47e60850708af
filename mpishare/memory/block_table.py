"""The blocks of a pool, in shared memory: the generation of each, and the ranks that hold it.

Each word has one writer. The owner writes the generation of a slot: odd while a block is alive in
it, even before and after. Every other process writes, in a row of its own, the generation that it
holds, or 0. It first announces, then reads the owner's word; the owner first ends a generation,
then reads the holders. With a full barrier in between on both sides, at least one of the two sees
the other (Dekker): a block that the owner gives back is never opened. The row of a process outside
the node is a file of its own, which the owner forgets with that process.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from mpishare.errors import UnsupportedError
from mpishare.memory.shared import SharedMemory, map_file, reserve

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Maximum number of blocks of a pool at a time.
MAX_BLOCKS = 1 << 20

_PAGE_WORDS = mmap.PAGESIZE // 8
_GROUPS = MAX_BLOCKS // _PAGE_WORDS
_ROW_NBYTES = 8 * MAX_BLOCKS


class BlockTable:
    """The table of one pool, as one process sees it.

    `memory` is sparse, of `nbytes_for` bytes, the same in every process. Slots come in groups of a
    page per writer, and the pages of a group are reserved with its first slot. `row` is that of a
    process outside the node, with a word for each slot.
    """

    def __init__(
        self,
        memory: SharedMemory,
        rank: int,
        memory_barrier: Callable[[], object],
        row: SharedMemory | None = None,
    ) -> None:
        self._memory, self._row = memory, row
        self._words = memoryview(memory.buffer).cast("Q")
        self._mine = self._words if row is None else memoryview(row.buffer).cast("Q")
        self._begin = _PAGE_WORDS * (1 + rank)
        writers = memory.nbytes // _ROW_NBYTES
        self._group_words = _PAGE_WORDS * writers
        self._others = [r for r in range(writers - 1) if r != rank]
        # On the owner: the rows of processes outside the node.
        self._outside: dict[Any, tuple[SharedMemory, memoryview[int]]] = {}
        self._memory_barrier = memory_barrier
        self._lock = threading.Lock()
        self._free: list[int] = []
        self._n_groups = 0
        self._pid = os.getpid()
        self._is_closed = False

    @property
    def is_writable(self) -> bool:
        """Whether this process may write: not after `close`, nor in a fork.

        A fork has copies of this rank's arrays, and may drop them while the arrays here live on.
        """
        return not self._is_closed and os.getpid() == self._pid

    @staticmethod
    def nbytes_for(size: int) -> int:
        """Bytes of a table for that many ranks; its pages are reserved as they are needed."""
        return _ROW_NBYTES * (1 + size)

    # --- the owner

    def begin(self) -> tuple[int, int]:
        """Begin a generation in a free slot; return slot and generation."""
        if not self._free:
            self._add_group()
        slot = self._free.pop()
        at = self._at(slot)
        generation = self._words[at] + 1
        self._words[at] = generation
        return slot, generation

    def end(self, slot: int, generation: int) -> None:
        """End the generation of a slot: from now on no rank can begin to hold it.

        One plain store, so that the callback of a weak reference may call it.
        """
        self._words[self._at(slot)] = generation + 1

    def is_held(self, slot: int) -> bool:
        """Whether a process holds a slot, or is about to see that its generation has ended.

        After `end` and `fence`.
        """
        words, at = self._words, self._at(slot) + _PAGE_WORDS
        if [rank for rank in self._others if words[at + _PAGE_WORDS * rank]]:
            return True
        # A copy: the door's thread adds and removes some.
        return bool(self._outside) and any(row[slot] for _, row in [*self._outside.values()])

    def open_file(self) -> int:
        """Return a descriptor by which a process outside the node reads the table."""
        return os.open(f"/proc/self/fd/{self._memory.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def add_row(self, holder: Any) -> int:
        """Return the descriptor of the row of a process outside the node, open until it is gone."""
        if holder not in self._outside:
            fd = os.memfd_create("mpishare", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, _ROW_NBYTES)
            # Else that process could cut it, and the owner's next look at it would be SIGBUS.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            row = SharedMemory(fd, _ROW_NBYTES)
            self._outside[holder] = row, memoryview(row.buffer).cast("Q")
        return self._outside[holder][0].fd

    def remove_row(self, holder: Any) -> None:
        """Forget all that a process outside the node holds: it is gone."""
        row, _ = self._outside.pop(holder, (None, None))
        if row is not None:
            row.close()

    def give_back(self, slot: int) -> None:
        """Free a slot for another block, once its generation has ended."""
        self._free.append(slot)

    # --- the other processes

    @classmethod
    def from_outside(cls, fds: Sequence[int], memory_barrier: Callable[[], object]) -> Self:
        """Map the files of `open_file` and `add_row`; the caller closes them."""
        memories = []
        for fd, is_mine in zip(fds, (False, True), strict=True):
            map_ = partial(map_file, is_writable=is_mine)
            memories.append(SharedMemory(os.dup(fd), os.fstat(fd).st_size, map_=map_))
            memories[-1].close_file()
        table, row = memories
        return cls(table, -1, memory_barrier, row)

    def is_alive(self, slot: int, generation: int) -> bool:
        return self._words[self._at(slot)] == generation

    def hold(self, slot: int, generation: int) -> bool:
        """Hold a block; return False, without holding it, if the owner has given it back."""
        at = self._at(slot)
        place = self._place(slot, at)
        self._mine[place] = generation
        self.fence()
        if self._words[at] == generation:
            return True
        self._mine[place] = 0
        return False

    def release_slot(self, slot: int) -> None:
        """Release a block: the owner may reuse it at once."""
        self._memory_barrier()
        self._mine[self._place(slot, self._at(slot))] = 0

    def close(self) -> None:
        """Unmap the table. May be repeated."""
        self._is_closed = True
        self._words.release()
        self._mine.release()
        for memory in filter(None, (self._memory, self._row)):
            memory.close()

    def fence(self) -> None:
        """Let no later load come before an earlier store."""
        self._memory_barrier()
        # The barrier does nothing on x86-64, whose only disorder is this one. A locked instruction
        # ends it there (Intel Software Developer's Manual, volume 3, 9.2.3.9), as the acquisition
        # of a lock uses.
        with self._lock:
            pass

    def _at(self, slot: int) -> int:
        group, index = divmod(slot, _PAGE_WORDS)
        return group * self._group_words + index

    def _place(self, slot: int, at: int) -> int:
        """Return the place of a slot in this process's row; the owner's word is `at`."""
        return at + self._begin if self._row is None else slot

    def _add_group(self) -> None:
        if self._n_groups == _GROUPS:
            raise UnsupportedError(
                f"a pool has at most {MAX_BLOCKS} blocks at a time. Allocate fewer and larger ones."
            )
        nbytes = 8 * self._group_words
        reserve(self._memory, self._n_groups * nbytes, nbytes)
        first = self._n_groups * _PAGE_WORDS
        self._n_groups += 1
        self._free.extend(reversed(range(first, first + _PAGE_WORDS)))

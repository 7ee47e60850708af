"""The blocks of a pool, in shared memory: the generation of each, and the ranks that hold it.

Each word has one writer. The owner writes the generation of a slot: odd while a block is alive in
it, even before and after. Every other rank writes, in a row of its own, the generation that it
holds, or 0. A rank first announces, then reads the owner's word; the owner first ends a generation,
then reads the holders. With a full barrier in between on both sides, at least one of the two sees
the other (Dekker): a block that the owner gives back is never opened.
"""

from __future__ import annotations

import mmap
import os
import threading
from typing import TYPE_CHECKING, Any

from mpishare.errors import UnsupportedError
from mpishare.memory.shared import reserve

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.memory.shared import SharedMemory

# Maximum number of blocks of a pool at a time.
MAX_BLOCKS = 1 << 20

_PAGE_WORDS = mmap.PAGESIZE // 8
_GROUPS = MAX_BLOCKS // _PAGE_WORDS


class BlockTable:
    """The table of one pool, as one rank sees it.

    `memory` is sparse, of `nbytes_for` bytes, the same on every rank. Slots come in groups of a
    page per writer, and the pages of a group are reserved with its first slot.
    """

    def __init__(
        self, memory: SharedMemory, rank: int, size: int, memory_barrier: Callable[[], object]
    ) -> None:
        self._memory = memory
        self._words = memoryview(memory.buffer).cast("Q")
        self._group_words = _PAGE_WORDS * (1 + size)
        self._others = [r for r in range(size) if r != rank]
        self._row = _PAGE_WORDS * (1 + rank)
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
        return 8 * _PAGE_WORDS * (1 + size) * _GROUPS

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

    def holders(self, slot: int) -> list[int]:
        """Return the ranks that hold a slot, or are about to see that its generation has ended.

        After `end` and `fence`.
        """
        at = self._at(slot) + _PAGE_WORDS
        return [r for r in self._others if self._words[at + _PAGE_WORDS * r]]

    def has(self, slot: Any) -> bool:
        """Whether this is a slot that was ever used; other processes may give any value."""
        return isinstance(slot, int) and 0 <= slot < self._n_groups * _PAGE_WORDS

    def give_back(self, slot: int) -> None:
        """Free a slot for another block, once its generation has ended."""
        self._free.append(slot)

    # --- the other ranks

    def is_alive(self, slot: int, generation: int) -> bool:
        return self._words[self._at(slot)] == generation

    def hold(self, slot: int, generation: int) -> bool:
        """Hold a block; return False, without holding it, if the owner has given it back."""
        at = self._at(slot)
        self._words[at + self._row] = generation
        self.fence()
        if self._words[at] == generation:
            return True
        self._words[at + self._row] = 0
        return False

    def release_slot(self, slot: int) -> None:
        """Release a block: the owner may reuse it at once."""
        self._memory_barrier()
        self._words[self._at(slot) + self._row] = 0

    def close(self) -> None:
        """Unmap the table. May be repeated."""
        self._is_closed = True
        self._words.release()
        self._memory.close()

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

"""The blocks of a pool, in shared memory: the generation of each, and the processes that hold it.

Each word has one writer. The owner writes the generation of a slot: odd while a block is alive in
it, even before and after. Every other process writes, in a row of its own, the generation that it
holds, or 0. It first announces, then reads the owner's word; the owner first ends a generation,
then reads the holders. With a full barrier in between on both sides, at least one of the two sees
the other (Dekker): a block that the owner gives back is never opened. Each row is a file, which the
owner forgets with the process that has it.
"""

from __future__ import annotations

import fcntl
import os
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from mpishare.errors import UnsupportedError
from mpishare.memory.shared import SharedMemory, map_file

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Maximum number of blocks of a pool at a time.
MAX_BLOCKS = 1 << 20

_NBYTES = 8 * MAX_BLOCKS


def _create() -> SharedMemory:
    """Make a file with a word for each slot; its pages come with the first touch of each."""
    # Not in /dev/shm, which may be full.
    fd = os.memfd_create("mpishare", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, _NBYTES)
    # Else another process could cut it, and the next look at it would be SIGBUS.
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return SharedMemory(fd, _NBYTES)


def _map(fd: int, *, is_writable: bool) -> SharedMemory:
    """Map such a file of another process; the caller closes it."""
    map_ = partial(map_file, is_writable=is_writable)
    memory = SharedMemory(os.dup(fd), os.fstat(fd).st_size, map_=map_)
    memory.close_file()
    return memory


def _words_of(memory: SharedMemory) -> memoryview[int]:
    return memoryview(memory.buffer).cast("Q")


class _Table:
    """The table of one pool, as one process sees it."""

    def __init__(self, memory: SharedMemory, memory_barrier: Callable[[], object]) -> None:
        self._memory = memory
        self._words = _words_of(memory)
        self._memory_barrier = memory_barrier
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._is_closed = False

    @property
    def is_writable(self) -> bool:
        """Whether this process may write: not after `close`, nor in a fork.

        A fork has copies of this process's arrays, and may drop them while those here live on.
        """
        return not self._is_closed and os.getpid() == self._pid

    def fence(self) -> None:
        """Let no later load come before an earlier store."""
        self._memory_barrier()
        # The barrier does nothing on x86-64, whose only disorder is this one. A locked instruction
        # ends it there (Intel Software Developer's Manual, volume 3, 9.2.3.9), as the acquisition
        # of a lock uses.
        with self._lock:
            pass

    def close(self) -> None:
        """Unmap the table. May be repeated."""
        self._is_closed = True
        self._words.release()
        self._memory.close()


class OwnTable(_Table):
    """The table on the owner of the pool, which makes it."""

    def __init__(self, memory_barrier: Callable[[], object]) -> None:
        super().__init__(_create(), memory_barrier)
        # Of the other processes.
        self._rows: dict[Any, tuple[SharedMemory, memoryview[int]]] = {}
        self._free: list[int] = []
        self._n_slots = 0

    def begin(self) -> tuple[int, int]:
        """Begin a generation in a free slot; return slot and generation."""
        if not self._free:
            if self._n_slots == MAX_BLOCKS:
                raise UnsupportedError(
                    f"a pool has at most {MAX_BLOCKS} blocks at a time. Allocate fewer and larger "
                    "ones."
                )
            self._free.append(self._n_slots)
            self._n_slots += 1
        slot = self._free.pop()
        generation = self._words[slot] + 1
        self._words[slot] = generation
        return slot, generation

    def end(self, slot: int, generation: int) -> None:
        """End the generation of a slot: from now on no process can begin to hold it.

        One plain store, so that the callback of a weak reference may call it.
        """
        self._words[slot] = generation + 1

    def is_held(self, slot: int) -> bool:
        """Whether a process holds a slot, or is about to see that its generation has ended.

        After `end` and `fence`.
        """
        # A copy: the door's thread adds and removes some.
        return any(row[slot] for _, row in [*self._rows.values()])

    def give_back(self, slot: int) -> None:
        """Free a slot for another block, once its generation has ended."""
        self._free.append(slot)

    def open_file(self) -> int:
        """Return a descriptor by which other processes read the table."""
        return os.open(f"/proc/self/fd/{self._memory.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def add_row(self, holder: Any) -> int:
        """Return the descriptor of the row of another process, open until it is gone."""
        if holder not in self._rows:
            row = _create()
            self._rows[holder] = row, _words_of(row)
        return self._rows[holder][0].fd

    def remove_row(self, holder: Any) -> None:
        """Forget all that another process holds: it is gone."""
        row, _ = self._rows.pop(holder, (None, None))
        if row is not None:
            row.close()


class OpenedTable(_Table):
    """The table and a row of its own in another process."""

    def __init__(self, fds: Sequence[int], memory_barrier: Callable[[], object]) -> None:
        """Map the files of `open_file` and `add_row`; the caller closes them."""
        table, row = fds
        super().__init__(_map(table, is_writable=False), memory_barrier)
        self._row_memory = _map(row, is_writable=True)
        self._row = _words_of(self._row_memory)

    def is_alive(self, slot: int, generation: int) -> bool:
        return self._words[slot] == generation

    def hold(self, slot: int, generation: int) -> bool:
        """Hold a block; return False, without holding it, if the owner has given it back."""
        self._row[slot] = generation
        self.fence()
        if self.is_alive(slot, generation):
            return True
        self._row[slot] = 0
        return False

    def release_slot(self, slot: int) -> None:
        """Release a block: the owner may reuse it at once."""
        self._memory_barrier()
        self._row[slot] = 0

    def close(self) -> None:
        super().close()
        self._row.release()
        self._row_memory.close()

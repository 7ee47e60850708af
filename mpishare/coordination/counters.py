"""Counters in shared memory: allocation, and release after a failure."""

from __future__ import annotations

from typing import NamedTuple

# 8-byte words per slot: 128 bytes, so that two writers never share a cache line.
SLOT_WORDS = 16
SLOT_NBYTES = 8 * SLOT_WORDS

# Added to a counter to end every wait on it, on the GPU too: waits compare cyclically.
RELEASED = 1 << 62


def whole_slots(count: int) -> int:
    """Return the words of the slots that so many words take."""
    return -(-count // SLOT_WORDS) * SLOT_WORDS


class Counters(NamedTuple):
    """A run of 8-byte counters that every rank of the node sees, and its GPUs too."""

    view: memoryview[int]
    address: int  # of the first on this rank's GPU; 0 on the host backend
    chunk: int
    start: int


# The words and the counters of a closed object, which holds no memory.
NO_WORDS = memoryview(b"").cast("Q")
NO_COUNTERS = Counters(NO_WORDS, 0, 0, 0)


class CounterPool:
    """Allocator of counters: all ranks ask in the same order, so each gets the same run."""

    def __init__(self) -> None:
        self._chunks: list[tuple[memoryview[int], int]] = []
        self._watched: list[memoryview[int]] = []
        self._fresh = 0
        self._free: dict[int, list[tuple[int, int]]] = {}

    def add(self, view: memoryview[int], address: int) -> None:
        """Add a chunk of zeroed shared memory; the rest of the last one is not used."""
        self._chunks.append((view, address))
        self._fresh = 0

    def has(self, count: int) -> bool:
        """Whether `take` finds room; else a chunk must be added, collectively."""
        if self._free.get(count):
            return True
        return bool(self._chunks) and self._fresh + count <= len(self._chunks[-1][0])

    def take(self, count: int) -> Counters:
        """Return counters that are all zero; `count` is a multiple of `SLOT_WORDS`."""
        if self._free.get(count):
            chunk, start = self._free[count].pop()
        else:
            chunk, start = len(self._chunks) - 1, self._fresh
            self._fresh += count
        view, address = self._chunks[chunk]
        return Counters(
            view[start : start + count], address + 8 * start if address else 0, chunk, start
        )

    @staticmethod
    def clear(counters: Counters) -> None:
        """Zero unused counters, on one rank before any may `take` them."""
        counters.view[:] = memoryview(bytes(8 * len(counters.view))).cast("Q")

    def give(self, counters: Counters) -> None:
        """Take cleared counters back."""
        free = self._free.setdefault(len(counters.view), [])
        free.append((counters.chunk, counters.start))

    def watch(self, view: memoryview[int]) -> None:
        """Release these counters of another pool too, until `unwatch`."""
        self._watched.append(view)

    def unwatch(self, view: memoryview[int]) -> None:
        self._watched = [each for each in self._watched if each is not view]

    def release_all(self) -> None:
        """End every wait on every counter. Repeated while a stream may still write."""
        for view in [*(view for view, _ in self._chunks), *self._watched]:
            for index in range(len(view)):
                value = view[index]
                if value < RELEASED:
                    view[index] = value + RELEASED

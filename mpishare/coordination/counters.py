"""Counters in shared memory: how they are handed out, given back, and released."""

from __future__ import annotations

from dataclasses import dataclass

SLOT_WORDS = 16
"""Words of 8 bytes in a slot: 128 bytes, so that two writers never share a cache line."""

RELEASED = 1 << 62
"""Added to a counter to let every wait on it pass, on the GPU too: waits compare cyclically."""


@dataclass(frozen=True)
class Counters:
    """A run of 8-byte counters that every rank of the node sees, and its GPUs too.

    Attributes
    ----------
    view : memoryview of unsigned 64-bit items
        The counters as the host sees them.
    address : int
        Where the GPU of this rank sees the first; 0 on the host backend.
    chunk, start : int
        Where they stand in the pool.
    """

    view: memoryview[int]
    address: int
    chunk: int
    start: int


NO_COUNTERS = Counters(memoryview(b"").cast("Q"), 0, 0, 0)
"""What a closed object has."""


class CounterPool:
    """Hands out counters, the same run on every rank, since every rank asks in the same order."""

    def __init__(self) -> None:
        self._chunks: list[tuple[memoryview[int], int]] = []
        self._watched: list[memoryview[int]] = []
        self._fresh = 0
        self._free: dict[int, list[tuple[int, int]]] = {}

    def add(self, view: memoryview[int], address: int) -> None:
        """Add a chunk of zeroed shared memory; what was left of the last one is given up."""
        self._chunks.append((view, address))
        self._fresh = 0

    def has(self, words: int) -> bool:
        """Whether `take` finds room; else a chunk must be added, collectively."""
        if self._free.get(words):
            return True
        return bool(self._chunks) and self._fresh + words <= len(self._chunks[-1][0])

    def take(self, words: int) -> Counters:
        """Return counters that are all zero; `words` is a multiple of `SLOT_WORDS`."""
        if self._free.get(words):
            chunk, start = self._free[words].pop()
        else:
            chunk, start = len(self._chunks) - 1, self._fresh
            self._fresh += words
        view, address = self._chunks[chunk]
        return Counters(
            view[start : start + words], address + 8 * start if address else 0, chunk, start
        )

    @staticmethod
    def clear(counters: Counters) -> None:
        """Zero counters that nobody uses any more: one rank, before any may `take` them."""
        for index in range(len(counters.view)):
            counters.view[index] = 0

    def give(self, counters: Counters) -> None:
        """Take cleared counters back."""
        free = self._free.setdefault(len(counters.view), [])
        free.append((counters.chunk, counters.start))

    def watch(self, view: memoryview[int]) -> None:
        """Release these words too, until `unwatch`: counters that are not of this pool."""
        self._watched.append(view)

    def unwatch(self, view: memoryview[int]) -> None:
        """Release them no more."""
        self._watched = [each for each in self._watched if each is not view]

    def release_all(self) -> None:
        """Let every wait on every counter pass. Repeated while a stream may still write."""
        for view in [*(view for view, _ in self._chunks), *self._watched]:
            for index in range(len(view)):
                value = view[index]
                if value < RELEASED:
                    view[index] = value + RELEASED

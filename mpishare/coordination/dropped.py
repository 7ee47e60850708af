"""Dropped objects: closed together, once all ranks have dropped them.

Python finds an object unreachable at any time, in any thread, and on each rank at another moment;
closing it is collective. So a rank only notes it, and publishes its number with the next agreement.
When the numbers of all ranks are there, all of them close the object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    class Droppable(Protocol):
        _closes_first: bool

        @property
        def is_closed(self) -> bool:
            """Whether it was closed."""
            ...

        def close(self) -> None:
            """Close it on all of its ranks."""
            ...

        def _let_go(self) -> bool:
            """Whether this rank uses none of its views any more."""
            ...


class Dropped:
    """The objects of one set of ranks, numbered alike on all, and the ranks that dropped each.

    For the thread that makes the collective calls.
    """

    def __init__(self) -> None:
        self._last = 0
        # Objects that this rank has dropped, held until they are closed.
        self._here: dict[int, Droppable] = {}
        self._unpublished: set[int] = set()
        # By how many ranks each was dropped, as far as that is published.
        self._count: dict[int, int] = {}

    def next_number(self) -> int:
        """Return the number of a new object, the same on all ranks."""
        self._last += 1
        return self._last

    def add(self, number: int, item: Droppable) -> None:
        self._here[number] = item
        self._unpublished.add(number)

    def forget(self, number: int) -> None:
        self._here.pop(number, None)
        self._unpublished.discard(number)
        self._count.pop(number, None)

    def news(self) -> list[int]:
        """Return the numbers to publish: of dropped objects that are no longer in use."""
        if not self._unpublished:
            return []
        # Plans first: their fields may lie in windows.
        order = sorted(self._unpublished, key=lambda number: not self._here[number]._closes_first)
        return [number for number in order if self._here[number]._let_go()]

    def close(self, published: Sequence[Sequence[int]], rank: int) -> None:
        """Close the objects that all ranks have dropped by now. Collective, host-blocking.

        `published` is the result of `news` on each rank, with this rank's at `rank`.
        """
        if any(published):
            for item in self._merge(published, rank):
                item.close()  # no effect where another object has closed it

    def _merge(self, published: Sequence[Sequence[int]], rank: int) -> list[Droppable]:
        """Return the objects that all have dropped, plans first, the newest first."""
        self._unpublished.difference_update(published[rank])
        for numbers in published:
            for number in numbers:
                self._count[number] = self._count.get(number, 0) + 1
        gone = sorted(n for n, count in self._count.items() if count == len(published))
        for number in gone:
            del self._count[number]
        newest_first = [self._here[number] for number in reversed(gone)]
        return sorted(newest_first, key=lambda item: not item._closes_first)

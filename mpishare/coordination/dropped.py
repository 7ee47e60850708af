"""Objects that nobody holds any more: closed together, once all ranks have dropped them.

Python says of an object that it is unreachable at any time, in any thread, on each rank at another
moment; to close it is collective. So a rank only notes it, and publishes its number with the next
agreement. When the numbers of all ranks are there, all of them close the object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    class Droppable(Protocol):
        """An object of all these ranks."""

        _closes_first: bool

        @property
        def is_closed(self) -> bool:
            """Whether it was closed."""
            ...

        def close(self) -> None:
            """Close it on all of its ranks."""
            ...

        def _let_go(self) -> bool:
            """Whether nothing of it is in use on this rank any more."""
            ...


class Dropped:
    """The objects of one set of ranks, and which of them were dropped where.

    All ranks number them in the same order. Methods are local, and of the thread that makes the
    collective calls.
    """

    def __init__(self) -> None:
        self._last = 0
        self._here: dict[int, Droppable] = {}
        """Those that this rank has dropped, held until they are closed."""
        self._unpublished: set[int] = set()
        self._count: dict[int, int] = {}
        """By how many ranks each was dropped, as far as that is published."""

    def next_number(self) -> int:
        """Return the number of a new object, the same on all ranks."""
        self._last += 1
        return self._last

    def add(self, number: int, item: Droppable) -> None:
        """Add an object that this rank has dropped."""
        self._here[number] = item
        self._unpublished.add(number)

    def forget(self, number: int) -> None:
        """Forget an object that is closed."""
        self._here.pop(number, None)
        self._unpublished.discard(number)
        self._count.pop(number, None)

    def news(self) -> list[int]:
        """Return the numbers to publish: of dropped objects that nothing uses any more."""
        if not self._unpublished:
            return []
        # First what may use others: the fields of a plan may lie in a window.
        order = sorted(self._unpublished, key=lambda number: not self._here[number]._closes_first)
        return [number for number in order if self._here[number]._let_go()]

    def close(self, published: Sequence[Sequence[int]], rank: int) -> None:
        """Close the objects that all ranks have dropped by now. Collective, host-blocking.

        Parameters
        ----------
        published : sequence of sequence of int
            What `news` returned on each rank, once all have heard of it.
        rank : int
            This one, in that sequence.
        """
        if any(published):
            for item in self._merge(published, rank):
                item.close()  # does nothing where another one has closed it

    def _merge(self, published: Sequence[Sequence[int]], rank: int) -> list[Droppable]:
        """Return what all have dropped, plans first, the newest first."""
        self._unpublished.difference_update(published[rank])
        for numbers in published:
            for number in numbers:
                self._count[number] = self._count.get(number, 0) + 1
        gone = sorted(n for n, count in self._count.items() if count == len(published))
        for number in gone:
            del self._count[number]
        newest_first = [self._here[number] for number in reversed(gone)]
        return sorted(newest_first, key=lambda item: not item._closes_first)

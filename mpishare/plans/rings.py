"""Rings: boxes that are cut at each call, by numbers that are new there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Cut(NamedTuple):
    """The cells that a piece of a ring gives to a reader at one call, along the ring."""

    ncells: int
    target: int  # where they begin among the cells of the reader
    source: int  # and among those of the piece

    @classmethod
    def of(cls, place: int, wanted: int, first: int, extent: int) -> Cut:
        """Cut what a reader of the places from `place` on gets of those from `first` on."""
        begin = max(0, first - place)
        ncells = min(wanted, first + extent - place) - begin
        return cls(max(ncells, 0), begin, place + begin - first)


class Slide(NamedTuple):
    """One end of a part of a ring.

    The reader wants cells of the ring from a place on; the piece has those from `first` on, counted
    on through the laps of the ring. The part has room for all that the one can want of the other.
    """

    axis: int  # that travels
    shift: int  # number of the shift
    start: int
    length: int  # of the ring
    wanted: int  # cells of the reader
    first: int
    extent: int  # of the piece
    is_source: bool  # whether this end is the piece

    def at(self, shifts: Sequence[int]) -> Cut:
        place = (self.start + shifts[self.shift]) % self.length
        return Cut.of(place, self.wanted, self.first, self.extent)

    def ends(self, shifts: Sequence[int]) -> tuple[int, int, int]:
        """Return how many cells travel, where they begin at this end, and where at the other."""
        ncells, target, source = self.at(shifts)
        return (ncells, source, target) if self.is_source else (ncells, target, source)

    def cut(self, shifts: Sequence[int]) -> tuple[slice, ...]:
        """Return the index in the whole of this end, as it travels."""
        ncells, first, _ = self.ends(shifts)
        return *(slice(None),) * self.axis, slice(first, first + ncells)

    def room(self, shifts: Sequence[int]) -> tuple[slice, ...]:
        """Return the index in the packed cells."""
        return *(slice(None),) * self.axis, slice(self.at(shifts).ncells)


class Shifts:
    """The numbers of the present call of a plan; what follows them is told of new ones."""

    def __init__(self, count: int = 0) -> None:
        self.values: list[Any] = [0] * count
        self._followers: list[Callable[[Sequence[int]], None]] = []

    def follow(self, update: Callable[[Sequence[int]], None]) -> None:
        """Call a function at once, and whenever there are other numbers."""
        self._followers.append(update)
        update(self.values)

    def set(self, values: Sequence[Any]) -> None:
        self.values = [*values]
        for update in self._followers:
            update(self.values)

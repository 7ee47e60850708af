"""The work items of a fused launch, remembered for plans that differ in their addresses alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.halo.cuda.work_items import WorkList

    Records = np.ndarray[Any, Any]


class Place(NamedTuple):
    """Where the memory of a plan is, as this rank's GPU sees it.

    Attributes
    ----------
    staging : sequence of (int, int)
        The address and the size of each staging buffer, those of the neighbors too.
    flags : int
        The address of the flags.
    """

    staging: Sequence[tuple[int, int]]
    flags: int


class FusedItems(NamedTuple):
    """The work items of a fused launch.

    Attributes
    ----------
    items : array of ITEM_RECORD
        In their order; one of zeros if there is none.
    length : int
        How many there are.
    parts : array of ITEM_RECORD
        The parts that travel by LL, a record each.
    log_chunks : int
        Of the chunks of the largest of these: the logarithm to the base of 2, rounded up.
    is_ll : bool
        Whether all items travel by LL.
    place : Place
        For which memory they are.
    """

    items: Records
    length: int
    parts: Records
    log_chunks: int
    is_ll: bool
    place: Place

    @classmethod
    def of(cls, work: WorkList, place: Place) -> FusedItems:
        """Return what was collected."""
        parts = work.ll_parts()
        return cls(work.records(), len(work), parts, work.log_ll_chunks, work.is_ll, place)

    @property
    def can_move(self) -> bool:
        """Whether staging buffers and flags are all that the items have addresses of."""
        others = self.items["target"] | self.items["flag"] | self.items["part"]["places"]
        return self.is_ll and bool(self.place.staging) and not others.any()


class MovableItems:
    """The items of an earlier plan, for plans like it whose memory is somewhere else. Local.

    Parameters
    ----------
    items : FusedItems
        Items that can move.
    """

    def __init__(self, items: FusedItems) -> None:
        self._items = items
        records = items.items, items.parts
        # For each record the buffer in which it lies packed, and whether it has a flag.
        self._buffers = [_buffers_of(each["packed"], items.place.staging) for each in records]
        self._waits = [(each["stalled_on"] != 0).astype("u8") for each in records]

    def at(self, place: Place) -> FusedItems:
        """Return them for the memory of another plan."""
        old = self._items.place
        pairs = zip(old.staging, place.staging, strict=True)
        shifts = _shifts([new - begin for (begin, _), (new, _) in pairs])
        (shift,) = _shifts([place.flags - old.flags])
        moved = []
        records = self._items.items, self._items.parts
        for each, buffers, waits in zip(records, self._buffers, self._waits, strict=True):
            found = each.copy()
            found["packed"] += shifts[buffers]
            found["stalled_on"] += waits * shift
            moved.append(found)
        items, parts = moved
        return self._items._replace(items=items, parts=parts, place=place)


def _buffers_of(packed: Records, staging: Sequence[tuple[int, int]]) -> Records:
    """Return for each address the number of the buffer that it is in."""
    found = np.zeros(len(packed), np.intp)
    for number, (begin, nbytes) in enumerate(staging):
        found[(packed >= begin) & (packed < begin + nbytes)] = number
    return found


def _shifts(differences: Sequence[int]) -> Records:
    """Return what is added to addresses, modulo their range."""
    return np.array([each % (1 << 64) for each in differences], np.uint64)

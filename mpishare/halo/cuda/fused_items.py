"""The work items of a fused launch, cached for plans that differ in addresses alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.halo.cuda.work_items import WorkList

    Records = np.ndarray[Any, Any]


class Place(NamedTuple):
    """The addresses of a plan's memory for this rank's GPU."""

    staging: Sequence[tuple[int, int]]  # and size of each buffer, the neighbors' too
    flags: int


class FusedItems(NamedTuple):
    """The work items of a fused launch, and the parts that travel by LL, a record each."""

    items: Records  # one of zeros if there is none
    length: int  # number of items
    parts: Records
    log_chunks: int  # log2, rounded up, of the chunks of the largest part
    is_ll: bool
    place: Place

    @classmethod
    def of(cls, work: WorkList, place: Place) -> FusedItems:
        parts = work.ll_parts()
        return cls(work.records(), len(work), parts, work.log_ll_chunks, work.is_ll, place)

    @property
    def can_move(self) -> bool:
        """Whether the items have no addresses but those of staging buffers and flags."""
        others = self.items["target"] | self.items["flag"] | self.items["part"]["places"]
        return self.is_ll and bool(self.place.staging) and not others.any()


class MovableItems:
    """The items of an earlier plan, for equal plans with memory elsewhere."""

    def __init__(self, items: FusedItems) -> None:
        self._items = items
        records = items.items, items.parts
        # For each record the buffer of its packed cells, and whether it publishes waits.
        self._buffers = [_buffers_of(each["packed"], items.place.staging) for each in records]
        self._waits = [(each["stalled_on"] != 0).astype("u8") for each in records]

    def at(self, place: Place) -> FusedItems:
        """Return the items for the memory of another plan."""
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
    """Return the index of the buffer of each address."""
    found = np.zeros(len(packed), np.intp)
    for number, (begin, nbytes) in enumerate(staging):
        found[(packed >= begin) & (packed < begin + nbytes)] = number
    return found


def _shifts(differences: Sequence[int]) -> Records:
    """Return differences of addresses modulo their range."""
    return np.array([each % (1 << 64) for each in differences], np.uint64)

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
        return self.is_ll and not others.any()

    def moved(self, place: Place) -> FusedItems:
        """Return the same items for memory that is somewhere else."""
        items, parts = (self._moved(records, place) for records in (self.items, self.parts))
        return self._replace(items=items, parts=parts, place=place)

    def _moved(self, records: Records, place: Place) -> Records:
        records = records.copy()
        packed = records["packed"].copy()
        pairs = zip(self.place.staging, place.staging, strict=True)
        for (begin, nbytes), (new, _) in pairs:
            is_there = (packed >= begin) & (packed < begin + nbytes)
            records["packed"][is_there] = packed[is_there] - np.uint64(begin) + np.uint64(new)
        waits = records["stalled_on"] != 0
        shift = np.uint64((place.flags - self.place.flags) % (1 << 64))
        records["stalled_on"][waits] += shift
        return records

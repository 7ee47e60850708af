"""What a rank sends to itself in host memory: a copy, in blocks that stay in the cache.

Where a grid has one rank along an axis that wraps, the cells of one end go to the ghosts of the
other. Along the last axis both ends of a row lie in the same or in neighboring cache lines, so both
copies are made for a few planes before the next few are touched: each line comes from memory once.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


_CACHE_NBYTES = 512 << 10
_LINE_NBYTES = 64
_WORTH_NBYTES = 128 << 10  # below, all that is copied stays in the cache anyway

Copy = tuple[int, Any, Any]
"""A field, where cells go, and where they come from."""


class Own:
    """The copies of one plan within this rank's fields. Local.

    Parameters
    ----------
    copies : sequence of Copy
        None of which reads what another writes.
    shapes : sequence of tuple of int
        Of the cells of each.
    itemsizes : sequence of int, bytes
        Of each field.

    Attributes
    ----------
    copies : list of Copy
        To make one after the other.
    """

    def __init__(
        self,
        copies: Sequence[Copy],
        shapes: Sequence[tuple[int, ...]],
        itemsizes: Sequence[int],
    ) -> None:
        whole: list[Copy] = []
        blocked: dict[tuple[int, int, int], list[tuple[Copy, tuple[int, ...]]]] = {}
        for copy, shape in zip(copies, shapes, strict=True):
            field, to, of = copy
            is_boxes = all(isinstance(each, slice) for each in (*to, *of))
            if (
                is_boxes
                and len(shape) > 1
                and to[0] == of[0]
                and prod(shape) * itemsizes[field] >= _WORTH_NBYTES
            ):
                blocked.setdefault((field, to[0].start, to[0].stop), []).append((copy, shape))
            else:
                whole.append(copy)
        self.copies = whole
        for (_, start, stop), group in blocked.items():
            touched = sum(
                2 * prod(shape[1:-1]) * max(shape[-1] * itemsizes[copy[0]], _LINE_NBYTES)
                for copy, shape in group
            )
            step = max(1, _CACHE_NBYTES // touched)
            for first in range(start, stop, step):
                planes = slice(first, min(first + step, stop))
                self.copies += [
                    (field, (planes, *to[1:]), (planes, *of[1:])) for (field, to, of), _ in group
                ]

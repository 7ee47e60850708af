"""The cells of an array, as integers."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Box:
    """Cells of one rank's array, ghosts counted: from `start` up to before `stop`."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        return prod(self.shape)

    def along(self, axes: Sequence[int], shape: Sequence[int]) -> Box:
        """Return the same cells of a field that the cart cuts along `axes`, whole along others."""
        start, stop = [0] * len(shape), list(shape)
        for axis, first, last in zip(axes, self.start, self.stop, strict=True):
            start[axis], stop[axis] = first, last
        return Box(tuple(start), tuple(stop))

    def slices(self) -> tuple[slice, ...]:
        return tuple(map(slice, self.start, self.stop))

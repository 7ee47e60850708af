"""A segment: the part of a window that one rank allocated or gave."""

from __future__ import annotations

from typing import NamedTuple

Shape = tuple[int, ...]


class Segment(NamedTuple):
    """How the elements of one rank's part of a window lie in memory.

    Attributes
    ----------
    shape : tuple of int
        Elements along each axis.
    strides : tuple of int or None, bytes
        Along each axis; None in C order.
    """

    shape: Shape
    strides: Shape | None = None

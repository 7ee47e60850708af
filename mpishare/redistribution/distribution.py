"""Which cells of a global array a rank has, as users say it and as a box per rank."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from operator import index
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from mpishare.memory.arguments import is_int
from mpishare.plans.cells import Box, meet

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import SupportsIndex


@dataclass(frozen=True)
class OnRank:
    """The whole of an array on one rank, and nothing on the others.

    Parameters
    ----------
    rank : int
        Of the communicator of the plan.
    """

    rank: int


Distribution: TypeAlias = "SupportsIndex | Sequence[SupportsIndex] | Box | OnRank | None"


def spread(name: str, given: Any, shape: Sequence[int], rank: int, size: int) -> tuple[str, Box]:
    """Return a distribution as users give it by one name for all its spellings, and a rank's part.

    Raises
    ------
    TypeError, ValueError
        If `given` is not a distribution of the shape over `size` ranks. `name` is the argument that
        the error names.
    """
    ndim = len(shape)
    whole = Box((0,) * ndim, tuple(shape))
    if given is None:
        return "None", whole
    if isinstance(given, OnRank):
        if not is_int(given.rank) or not 0 <= given.rank < size:
            raise ValueError(f"{name} is {given!r}: ranks are 0 to {size - 1}")
        box = whole if rank == given.rank else Box(whole.lower, whole.lower)
        return f"OnRank({index(given.rank)})", box
    if isinstance(given, Box):
        return "a Box of each rank", _checked(name, given, shape)
    if is_int(given):
        axis = index(given)
        if not -ndim <= axis < ndim:
            raise ValueError(f"{name} cuts axis {axis}: the array has {ndim} axes")
        parts = [1] * ndim
        parts[axis] = size
        return f"axis {axis % ndim}", _cut(parts, shape, rank)
    parts = _parts(name, given, ndim, size)
    return str(tuple(parts)), _cut(parts, shape, rank)


def _parts(name: str, given: Any, ndim: int, size: int) -> list[int]:
    try:
        parts = [*map(index, given)]
    except TypeError:
        raise TypeError(
            f"{name} must be an axis, the number of ranks along each axis, a Box, an OnRank or "
            f"None, not {given!r}"
        ) from None
    if len(parts) != ndim or prod(parts) != size or min(parts) < 1:
        raise ValueError(
            f"{name} is {tuple(parts)}: it must have the number of ranks along each of {ndim} "
            f"axes, whose product is {size}"
        )
    return parts


def _checked(name: str, given: Box, shape: Sequence[int]) -> Box:
    """Return a rank's own box with ints, within the array."""
    try:
        box = Box(tuple(map(index, given.lower)), tuple(map(index, given.upper)))
    except TypeError:
        raise TypeError(f"{name} is {given!r}: its ends are ints, one for each axis") from None
    fits = len(box.lower) == len(box.upper) == len(shape) and all(
        0 <= first <= last <= extent
        for first, last, extent in zip(box.lower, box.upper, shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"{name} is {given!r}: it is not within an array of shape {tuple(shape)}. Along each "
            "axis give 0 <= lower <= upper <= extent"
        )
    return box


def require_disjoint(name: str, boxes: Sequence[Box], then: str) -> None:
    """Raise `ValueError` if two ranks have the same cell; `then` is how the message ends."""
    for rank, other in np.argwhere(np.tril(meet(boxes, boxes), -1)):
        both = boxes[rank] & boxes[other]
        raise ValueError(f"ranks {other} and {rank} both have {both} of the {name}: {then}")


def require_covered(wanted: Sequence[Box], there: Sequence[Box], what: str) -> None:
    """Raise `ValueError` if a wanted cell is in none of the disjoint boxes `there`.

    `what` is the message, with the places of ``{rank}`` and ``{box}``.
    """
    for rank, box in enumerate(wanted):
        if sum((box & each).size for each in there) < box.size:
            raise ValueError(what.format(rank=rank, box=box.without(*there)[0]))


def _cut(parts: Sequence[int], shape: Sequence[int], rank: int) -> Box:
    """Return a rank's part, as `numpy.array_split` cuts along each axis."""
    start, stop = [], []
    for at, count, extent in zip(np.unravel_index(rank, parts), parts, shape, strict=True):
        each, longer = divmod(extent, count)
        first, last = (end * each + min(end, longer) for end in (int(at), int(at) + 1))
        start.append(first)
        stop.append(last)
    return Box(tuple(start), tuple(stop))

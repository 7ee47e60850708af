"""The whole picture of a Cartesian grid, joined from the segments of its ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Ghosts = list[tuple[int, int]]


def join(segments: Mapping[int, Any], dims: Sequence[int], width: Any) -> Any:
    """Return a new array of all segments without their ghosts; see `Frame.whole`."""
    ranks = list(segments)
    axes = {array.ndim for array in segments.values()}
    if math.prod(dims) != len(ranks) or axes != {len(dims)}:
        raise ValueError(
            f"whole failed: dims {tuple(dims)} do not fit {len(ranks)} segments of {sorted(axes)} "
            "axes: give the number of ranks along each axis, 1 for one that is not cut"
        )
    ghosts = _ghosts(width, len(dims))
    blocks = {}
    for place, rank in zip(np.ndindex(*dims), ranks, strict=True):
        shape = segments[rank].shape
        if any(low + high > extent for (low, high), extent in zip(ghosts, shape, strict=True)):
            raise ValueError(f"whole failed: the segment of rank {rank}, {shape}, is all ghosts")
        cuts = (slice(low, n - high) for (low, high), n in zip(ghosts, shape, strict=True))
        blocks[place] = segments[rank][tuple(cuts)]
    extents = [
        [blocks[tuple(i * (a == axis) for a in range(len(dims)))].shape[axis] for i in range(count)]
        for axis, count in enumerate(dims)
    ]
    first = segments[ranks[0]]
    whole = np.empty_like(first, shape=tuple(map(sum, extents)), order="C")  # CuPy's where it is
    for (place, block), rank in zip(blocks.items(), ranks, strict=True):
        expected = tuple(extents[axis][i] for axis, i in enumerate(place))
        if block.shape != expected:
            raise ValueError(
                f"whole failed: rank {rank} at {place} has {block.shape} cells of its own, not "
                f"{expected} as its neighbors in the grid"
            )
        starts = [sum(extents[axis][:i]) for axis, i in enumerate(place)]
        cells = (slice(s, s + n) for s, n in zip(starts, expected, strict=True))
        whole[tuple(cells)] = block
    return whole


def _ghosts(width: Any, naxes: int) -> Ghosts:
    """Return the ghosts at both ends of each axis."""
    each = [width] * naxes if np.ndim(width) == 0 else list(width)
    pairs = [tuple(w) if np.ndim(w) else (w, w) for w in each]
    is_right = len(pairs) == naxes and all(
        len(pair) == 2 and all(isinstance(n, int | np.integer) and n >= 0 for n in pair)
        for pair in pairs
    )
    if not is_right:
        raise ValueError(
            f"whole failed: width={width!r} must be an int, or for each of {naxes} axes an int or "
            "a pair (low, high), none of them negative"
        )
    return [(int(low), int(high)) for low, high in pairs]

"""Frames of a named window: copies of its snapshots, which can be joined to the whole of a grid."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.memory.arguments import ghosts_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Frame:
    """A snapshot: copies that belong to this process.

    Attributes
    ----------
    number : int
        From 1: the number of calls of each rank to `Window.snapshot`; of frames of the channel.
    numbers : dict
        What the ranks gave `Window.snapshot` by name; of the lowest rank that gave the name.
    """

    def __init__(self, number: int, arrays: dict[int, Any], numbers: dict[str, Any]) -> None:
        self.number = number
        self.numbers = numbers
        self._arrays = arrays

    @property
    def array(self) -> Any:
        """The whole window, or the first rank's segment where each rank has one."""
        return next(iter(self._arrays.values()))

    def segment(self, rank: int) -> Any:
        """Return that rank's segment; ValueError if it has none."""
        if rank not in self._arrays:
            raise ValueError(f"rank {rank!r} has no segment; ranks {list(self._arrays)} do")
        return self._arrays[rank]

    def whole(self, dims: Sequence[int], width: Any = 0) -> Any:
        """Return a new array of the whole of a Cartesian grid, joined from all segments.

        Parameters
        ----------
        dims : sequence of int
            The number of ranks along each axis of the segments, as of ``Create_cart`` of MPI; 1
            along an axis that is not cut. The ranks lie row by row, as MPI numbers them. Blocks may
            be of uneven size.
        width : int, or sequence of int or (low, high)
            The ghosts of each segment, which are left out: as of `HaloExchange`, but the same on
            all ranks.

        Raises
        ------
        ValueError
            If the segments do not fit together so.
        """
        return _join(self._arrays, dims, width)

    def __repr__(self) -> str:
        return f"<mpishare frame {self.number} of ranks {list(self._arrays)}>"


def _join(segments: Mapping[int, Any], dims: Sequence[int], width: Any) -> Any:
    axes = {array.ndim for array in segments.values()}
    if math.prod(dims) != len(segments) or axes != {len(dims)}:
        raise ValueError(
            f"whole failed: dims {tuple(dims)} do not fit {len(segments)} segments of "
            f"{sorted(axes)} axes: give the number of ranks along each axis, 1 for one that is not "
            "cut"
        )
    ghosts = ghosts_of(width, len(dims))
    if ghosts is None:
        raise ValueError(
            f"whole failed: width={width!r} must be an int, or for each of {len(dims)} axes an int "
            "or a pair (low, high), none of them negative"
        )
    owned = [_owned(rank, segment, ghosts) for rank, segment in segments.items()]
    blocks = dict(zip(np.ndindex(*dims), owned, strict=True))
    bounds = _bounds(blocks, dims)
    # CuPy's where the segments are.
    whole = np.empty_like(owned[0], shape=tuple(each[-1] for each in bounds), order="C")
    for (place, block), rank in zip(blocks.items(), segments, strict=True):
        cells = tuple(slice(*each[i : i + 2]) for each, i in zip(bounds, place, strict=True))
        expected = whole[cells].shape
        if block.shape != expected:
            raise ValueError(
                f"whole failed: rank {rank} at {place} has {block.shape} cells of its own, not "
                f"{expected} as its neighbors in the grid"
            )
        whole[cells] = block
    return whole


def _owned(rank: int, segment: Any, ghosts: Sequence[tuple[int, int]]) -> Any:
    axes = list(zip(ghosts, segment.shape, strict=True))
    if any(low + high > extent for (low, high), extent in axes):
        raise ValueError(
            f"whole failed: the segment of rank {rank}, {segment.shape}, is all ghosts"
        )
    return segment[tuple(slice(low, extent - high) for (low, high), extent in axes)]


def _bounds(blocks: Mapping[tuple[int, ...], Any], dims: Sequence[int]) -> list[list[int]]:
    """Return where the blocks begin along each axis, and where the last one ends."""
    zeros = (0,) * len(dims)
    extents = (
        [blocks[(*zeros[:axis], i, *zeros[axis + 1 :])].shape[axis] for i in range(count)]
        for axis, count in enumerate(dims)
    )
    return [list(accumulate(each, initial=0)) for each in extents]

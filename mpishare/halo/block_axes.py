"""The axes of a block, for a plan that takes any fields of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishare.halo.geometry import normalize_axes

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST_AXES = 64
"""More than an array has."""


def normalize_block_axes(axes: Any, naxes: int) -> tuple[int, ...]:
    """Return which axis of a block each axis of the cart cuts.

    A block has only the axes that are cut, in the order that `axes` gives them in its fields.

    Examples
    --------
    >>> normalize_block_axes(None, 2), normalize_block_axes((-1, -3), 2)
    ((0, 1), (1, 0))
    """
    found = normalize_axes(tuple(range(naxes)) if axes is None else axes, naxes, _MOST_AXES)
    order = sorted(found)
    return tuple(order.index(axis) for axis in found)


def fields_of_block(
    extents: Sequence[int], axes: Any
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return cut axes and shapes of two fields that stand for all fields of a block.

    `extents` count ghosts, one for each axis of the cart.

    Examples
    --------
    >>> fields_of_block((4, 5), (-2, -1))
    ([(0, 1), (1, 2)], [(4, 5), (1, 4, 5)])
    """
    naxes = len(extents)
    axes = tuple(range(naxes)) if axes is None else axes
    named = list(axes) if hasattr(axes, "__iter__") else [axes]
    first = max(0, *(axis + 1 for axis in named)) + max(0, *(-axis for axis in named))
    cut = [normalize_axes(axes, naxes, ndim) for ndim in (first, first + 1)]
    shapes = []
    for ndim, own in zip((first, first + 1), cut, strict=True):
        at = dict(zip(own, extents, strict=True))
        shapes.append(tuple(at.get(axis, 1) for axis in range(ndim)))
    return cut, shapes

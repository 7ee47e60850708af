"""`Seam`, as users write it, and as all ranks learn of it: checked by the rank that lists it."""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

import numpy as np

from mpishare.memory.arguments import is_int, items_of
from mpishare.memory.numbers import number_of
from mpishare.plans.cells import Box

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.memory.types import Index
    from mpishare.plans.layout import FieldLayout

    Source = tuple[SupportsIndex, SupportsIndex, Index | slice]
    """A rank, a field of it, and a box of that."""


@dataclass(frozen=True)
class Seam:
    """Cells of a field of this rank that are those of any box of any field, turned and scaled.

    ``mine[into] = scale * numpy.flip(theirs[box].transpose(axes), flip) + offset``, by
    `SeamExchange`. Boxes are slices of step 1, as ``numpy.s_[:, 0:3]``: axes that are left out, or
    under ``...``, are whole, negative bounds count from the end, and nothing is clipped.

    Parameters
    ----------
    into : tuple
        A field of this rank by its number, and the box that is written.
    source : tuple, or list of tuple
        A rank of the communicator, a field of that rank by its number, and the box that is read. A
        list is a ring: boxes that lie end to end along `along`, and the last meets the first. The
        cells of `into` are then its places `start`, ``start + 1`` and so on, modulo its length.
    axes : sequence of int, optional
        ``axes[k]`` is the axis of the source that lies along axis k of `into`; axes behind those
        that are named are as they are. Default: all.
    flip : sequence of int
        Axes of `into` along which the cells run backwards.
    scale, offset : number
        The product and the sum are each rounded to the dtype; 1 and 0 move bits as they are.
        Complex ones for complex fields, real ones for real fields; signed integers take a scale of
        1 or -1, unsigned ones 1, both whole offsets. Other elements only move.
    along : int, optional
        Of a ring: the axis of the source along which its boxes are laid.
    start : int
        Of a ring: the place of the first cell in the order of the source, before `flip`.
    shift : str, optional
        Of a ring: the name of a number that each call adds to `start`.
    """

    into: tuple[SupportsIndex, Index | slice]
    source: Source | Sequence[Source]
    axes: Sequence[SupportsIndex] | None = None
    flip: Sequence[SupportsIndex] = ()
    scale: complex = 1.0
    offset: complex = 0.0
    along: SupportsIndex | None = None
    start: SupportsIndex = 0
    shift: str | None = None


class PackedSeam(NamedTuple):
    """A seam as ranks send it to each other: axes count from 0, factors are bytes."""

    field: int
    into: Any  # a packed box
    axes: Sequence[int]
    flip: Sequence[int]
    factors: Sequence[str | None]  # scale and offset, an element each, as hexadecimal digits
    along: int | None
    start: int
    shift: str | None
    pieces: Sequence[tuple[int, int, Sequence[tuple[int | None, int | None]]]]


def pack_seam(seam: Any, layouts: Sequence[FieldLayout]) -> PackedSeam:
    """Check a seam of a rank with these fields, and return it as others learn of it."""
    if not isinstance(seam, Seam):
        raise TypeError(f"it must be a Seam, not {seam!r}")
    field, box = _pair(seam.into)
    if not 0 <= field < len(layouts):
        raise ValueError(f"into names field {field}, and this rank has {len(layouts)}")
    layout = layouts[field]
    ndim = len(layout.shape)
    axis_of = _axis_of(ndim)
    axes = [axis_of("axes", each) for each in (seam.axes or ())]
    axes += range(len(axes), ndim)  # those behind are as they are
    if sorted(axes) != list(range(ndim)):
        raise ValueError(f"axes must name each of {ndim} axes once, not {seam.axes!r}")
    is_ring = isinstance(seam.source, list)
    if is_ring != (seam.along is not None):
        raise ValueError("a list of boxes and along= make a ring: give both or neither")
    if not is_ring and (seam.start or seam.shift is not None):
        raise ValueError("start= and shift= are of a ring, whose source is a list of boxes")
    if not isinstance(seam.shift, str | None) or not is_int(seam.start):
        raise TypeError(f"start must be an int, shift a name: {seam.start!r}, {seam.shift!r}")
    sources: Any = seam.source if is_ring else [seam.source]
    return PackedSeam(
        field,
        box_in("into", spans_of("into", box, ndim), layout.shape).pack(),
        [*axes],
        sorted({axis_of("flip", each) for each in seam.flip}),
        [_element("scale", seam.scale, 1, layout), _element("offset", seam.offset, 0, layout)],
        None if seam.along is None else axis_of("along", seam.along),
        index(seam.start),
        seam.shift,
        [_piece(each, ndim) for each in sources],
    )


def _pair(into: Any) -> tuple[int, Any]:
    found = items_of(into) or []
    if len(found) != 2 or not is_int(found[0]):
        raise TypeError(f"into must be the number of a field and a box, not {into!r}")
    return index(found[0]), found[1]


def _piece(source: Any, ndim: int) -> tuple[int, int, list[tuple[int | None, int | None]]]:
    found = items_of(source) or []
    if len(found) != 3 or not all(map(is_int, found[:2])):
        raise TypeError(f"source must be a rank, a field and a box, or a list, not {source!r}")
    return index(found[0]), index(found[1]), spans_of("source", found[2], ndim)


def _axis_of(ndim: int) -> Callable[[str, Any], int]:
    def axis_of(name: str, axis: Any) -> int:
        if not is_int(axis) or not -ndim <= axis < ndim:
            raise ValueError(f"{name} names axis {axis!r}, and the field has {ndim}")
        return index(axis) % ndim

    return axis_of


def spans_of(name: str, box: Any, ndim: int) -> list[tuple[int | None, int | None]]:
    """Return the bounds of a box along all axes of a field, as they were given."""
    items = list(box) if isinstance(box, tuple) else [box]
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (ndim + 1 - len(items))
    if len(items) > ndim:
        raise ValueError(f"{name} has {len(items)} slices, and the field {ndim} axes")
    items += [slice(None)] * (ndim - len(items))
    for item in items:
        if not isinstance(item, slice) or item.step not in (None, 1):
            raise TypeError(f"{name} must be slices of step 1, not {item!r}")
    return [tuple(at if at is None else index(at) for at in (s.start, s.stop)) for s in items]  # type: ignore[misc]


def box_in(name: str, spans: Sequence[Sequence[int | None]], shape: Sequence[int]) -> Box:
    """Return a box in a field of this shape; `ValueError` if it leaves it."""
    bounds = []
    for (start, stop), extent in zip(spans, shape, strict=True):
        low, high = 0 if start is None else start, extent if stop is None else stop
        low, high = (at + extent if at < 0 else at for at in (low, high))
        if not 0 <= low <= high <= extent:
            raise ValueError(
                f"{name} has cells {start} to {stop} along an axis of a field of shape "
                f"{tuple(shape)}: nothing is clipped"
            )
        bounds.append((low, high))
    lower, upper = zip(*bounds, strict=True) if bounds else ((), ())
    return Box(lower, upper)


def _element(name: str, value: Any, plain: int, layout: FieldLayout) -> str | None:
    """Return a factor as the bytes of an element, None for the one that changes nothing."""
    if value == plain:
        return None
    dtype, number = layout.dtype, number_of(layout.dtype)
    kind = dtype.kind if number is None else number.kind
    is_whole = kind in "iu" and kind and np.isrealobj(value) and value == int(value)
    is_right = {
        "c": True,
        "f": bool(np.isrealobj(value)),
        "i": bool(is_whole) and (name == "offset" or value == -1),
        "u": bool(is_whole) and name == "offset",
    }
    if not is_right.get(kind, False):
        raise TypeError(f"{name} {value!r} is not for elements of {dtype}")
    found = np.array(int(value) if kind in "iu" else value, dtype)
    return found.tobytes().hex()

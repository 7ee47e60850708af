"""`Seam`, as users write it, and as all ranks learn of it: checked by the rank that lists it."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Number
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

import numpy as np

from mpishare.memory.arguments import axes_of, is_int, items_of
from mpishare.memory.numbers import number_of
from mpishare.plans.cells import Box

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    field, box = _place("into must be the number of a field and a box", seam.into, 1)
    if not 0 <= field < len(layouts):
        raise ValueError(f"into names field {field}, and this rank has {len(layouts)}")
    layout = layouts[field]
    ndim = len(layout.shape)
    axes = axes_of("axes", () if seam.axes is None else seam.axes, ndim)
    axes += range(len(axes), ndim)  # those behind are as they are
    if sorted(axes) != list(range(ndim)):
        raise ValueError(f"axes must name each of {ndim} axes once, not {seam.axes!r}")
    if not isinstance(seam.shift, str | None) or not is_int(seam.start):
        raise TypeError(f"start must be an int, shift a name: {seam.start!r}, {seam.shift!r}")
    is_ring = isinstance(seam.source, list)
    if is_ring != (seam.along is not None):
        raise ValueError("a list of boxes and along= make a ring: give both or neither")
    if not is_ring and (seam.start or seam.shift is not None):
        raise ValueError("start= and shift= are of a ring, whose source is a list of boxes")
    wanted, sources = "source must be a rank, a field and a box, or a list", [seam.source]
    pieces = [_place(wanted, each, 2) for each in (seam.source if is_ring else sources)]
    return PackedSeam(
        field,
        box_in("into", spans_of("into", box, ndim), layout.shape).pack(),
        axes,
        axes_of("flip", seam.flip, ndim),
        [_element("scale", seam.scale, 1, layout), _element("offset", seam.offset, 0, layout)],
        axes_of("along", [seam.along], ndim)[0] if is_ring else None,
        index(seam.start),
        seam.shift,
        [(rank, number, spans_of("source", box, ndim)) for rank, number, box in pieces],
    )


def _place(wanted: str, given: Any, count: int) -> list[Any]:
    """Return so many ints and a box, or raise `TypeError`."""
    found = items_of(given) or []
    if len(found) != count + 1 or not all(map(is_int, found[:count])):
        raise TypeError(f"{wanted}, not {given!r}")
    return [*map(index, found[:count]), found[count]]


def spans_of(name: str, box: Any, ndim: int) -> list[tuple[int | None, int | None]]:
    """Return the bounds of a box along all axes of a field, as they were given."""
    items = list(box) if isinstance(box, tuple) else [box]
    whole = [at for at, item in enumerate(items) if item is Ellipsis]
    for at in whole[:1]:
        items[at : at + 1] = [slice(None)] * (ndim + 1 - len(items))
    if len(items) > ndim:
        raise ValueError(f"{name} has {len(items)} slices, and the field {ndim} axes")
    items += [slice(None)] * (ndim - len(items))
    spans = []
    for item in items:
        ends = (item.start, item.stop) if isinstance(item, slice) and item.step in (None, 1) else ()
        if not ends or not all(each is None or is_int(each) for each in ends):
            raise TypeError(f"{name} must be slices of step 1 between ints, not {item!r}")
        spans.append(tuple(each if each is None else index(each) for each in ends))
    return spans  # type: ignore[return-value]


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
    dtype, number = layout.dtype, number_of(layout.dtype)
    kind = dtype.kind if number is None else number.kind
    is_number = isinstance(value, Number)
    is_real = is_number and bool(np.isrealobj(value))
    if is_number and value == plain:
        return None
    if kind in ("i", "u"):
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
        is_right = is_real and least <= value <= most and value == int(value)
        is_right = is_right and (name == "offset" or value == -1)
    else:
        is_right = is_real if kind == "f" else kind == "c" and is_number
    if not is_right:
        raise TypeError(f"{name} {value!r} is not for elements of {dtype}")
    return np.array(int(value) if kind in "iu" else value, dtype).tobytes().hex()

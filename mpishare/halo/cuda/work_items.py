"""The tables that the kernels read: cells of fields, and what is done with them.

The records are those of cells.cuh, field by field.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod
from struct import Struct
from typing import TYPE_CHECKING, Any

from mpishare.errors import UnsupportedError
from mpishare.halo.geometry import Box
from mpishare.halo.layout import Layout
from mpishare.halo.message import ALIGN, Part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


AXES = 8
PACK, PACK_AND_ZERO, LOCAL, UNPACK, PUT_LL, GET_LL = range(6)

# first, step[8], places, extent[8], axes, along, field, unit
_PART = Struct("<q8qQ8I4i")
# The part; packed, turn, flag, late, target, first, count, kind, element, unused
ITEM = Struct(f"<{_PART.size}sQqQQQIIiiQ")

_ELEMENTS = {"i1": 0, "i2": 1, "i4": 2, "i8": 3, "f2": 4, "f4": 5, "f8": 6}
# The least bytes of an item, by the bytes of the part: one pass of a block's threads over words;
# few passes; and more where there are many items, so that taking one costs little beside it.
_CHUNKS = ((128 << 10, 4 << 10), (4 << 20, 16 << 10), (32 << 20, 32 << 10), (1 << 62, 64 << 10))
# The same where ranks share a GPU: each has few blocks, which take many items one after the other.
_CROWDED = ((128 << 10, 4 << 10), (512 << 10, 32 << 10), (4 << 20, 64 << 10), (1 << 62, 128 << 10))
_MOST_CHUNKS = 1024
# So many items of a part are pushed before the first is waited for: enough to fill the links.
_AHEAD = 64
# What words can be made of, and up to where they are faster than cells and a flag.
_WORD_UNITS, _MOST_WORDS_NBYTES = (4, 8), 128 << 10


def chunks(nbytes: int, *, shares_gpu: bool) -> Iterator[tuple[int, int]]:
    """Cut the bytes of a part into items: where each begins, and its bytes. Same at both ends.

    Parameters
    ----------
    nbytes : int, bytes
        Of the part.
    shares_gpu : bool
        Whether its sender or its receiver shares a GPU with other ranks.
    """
    steps = _CROWDED if shares_gpu else _CHUNKS
    step = next(step for most, step in steps if nbytes <= most)
    step = max(step, -(-nbytes // _MOST_CHUNKS))
    step = -(-step // ALIGN) * ALIGN
    for begin in range(0, nbytes, step):
        yield begin, min(step, nbytes - begin)


def are_words(nbytes: int, unit: int) -> bool:
    """Whether a fused part travels as words: half data, half the epoch. Same at both ends.

    Parameters
    ----------
    nbytes : int, bytes
        Of the part.
    unit : int, bytes
        What both ends can move at once, whatever arrays the calls give.
    """
    return nbytes <= _MOST_WORDS_NBYTES and unit >= _WORD_UNITS[0]


def natural(layout: Layout) -> int:
    """Return what the address of every array of a dtype is a multiple of, 16 at most."""
    size = layout.dtype.itemsize
    return min(size & -size, ALIGN)


def unit_of(part: Part, layout: Layout) -> int:
    """Return the widest unit of a part in any array of the layout, in bytes."""
    return StridedCells.of(part, layout, natural(layout)).unit


@dataclass(frozen=True)
class StridedCells:
    """The cells of a part as axes of units."""

    first: int
    extents: list[int]
    steps: list[int]
    along: int
    unit: int

    @classmethod
    def of(cls, part: Part, layout: Layout, most: int) -> StridedCells:
        """Return them in units of at most that many bytes, which every step is a multiple of."""
        start = part.box.start if part.box is not None else (0,) * len(part.shape)
        along = -1 if part.box is not None else part.axis
        return _cells(start, part.shape, along, layout.strides, layout.dtype.itemsize, most)


# Many fields of one layout have the same cells.
@lru_cache(maxsize=256)
def _cells(
    start: tuple[int, ...],
    shape: tuple[int, ...],
    along: int,
    strides: tuple[int, ...],
    itemsize: int,
    most: int,
) -> StridedCells:
    first = sum(at * step for at, step in zip(start, strides, strict=True))
    axes: list[tuple[int, int, bool]] = []  # extent, step, whether it is counted by places
    for axis, (extent, step) in enumerate(zip(shape, strides, strict=True)):
        if extent != 1 or axis == along:
            _join(axes, extent, step, is_along=axis == along)
    _join(axes, itemsize, 1, is_along=False)
    run = axes[-1][0] if axes[-1][1] == 1 else 1
    unit = gcd(first, run, ALIGN, *(step for _, step, _ in axes[:-1]))
    unit = min(unit & -unit, most)
    extents = [extent for extent, _, _ in axes]
    steps = [step for _, step, _ in axes]
    extents[-1] //= unit
    steps[-1] = unit
    where = [is_along for _, _, is_along in axes]
    if len(extents) > AXES:
        raise UnsupportedError(
            f"cells of shape {shape} in a field of strides {strides} need {len(extents)} axes: "
            f"{AXES} are allowed"
        )
    if prod(extents) >= 1 << 31:
        raise UnsupportedError(f"{prod(extents)} units in one part of a message: too many")
    return StridedCells(first, extents, steps, where.index(True) if True in where else -1, unit)


def _join(axes: list[tuple[int, int, bool]], extent: int, step: int, *, is_along: bool) -> None:
    """Append an axis, as a part of the one before where both are one run."""
    if axes:
        before, before_step, before_along = axes[-1]
        if not is_along and not before_along and before_step == extent * step:
            axes[-1] = before * extent, step, False
            return
    axes.append((extent, step, is_along))


class WorkList:
    """Items for one kernel, in order. Local.

    Parameters
    ----------
    layouts : sequence of Layout
        This rank's fields'.
    most : sequence of int, bytes
        For each field, the widest unit: what its address is a multiple of.
    upload : callable
        Copies an array to the GPU and returns its address there.
    """

    def __init__(
        self, layouts: Sequence[Layout], most: Sequence[int], upload: Callable[[Any], int]
    ) -> None:
        self._layouts = layouts
        self._most = most
        self._upload = upload
        self._items: list[tuple[int, bytes]] = []

    def __len__(self) -> int:
        """How many items it has."""
        return len(self._items)

    def move(
        self,
        kind: int,
        part: Part,
        packed: int,
        turn: int = 0,
        flags: Sequence[int] | None = None,
        target: Part | None = None,
        late: int = 0,
        *,
        shares_gpu: bool = False,
    ) -> None:
        """Add the items of a part: to or from `packed`, or to `target`; `late` as in the kernel.

        `shares_gpu` as of `chunks`.
        """
        cells, to = self._cells(part, _WORD_UNITS[-1] if kind in (PUT_LL, GET_LL) else ALIGN), 0
        if target is not None:
            # Both in the units that both can.
            other = self._cells(target, cells.unit)
            cells = self._cells(part, other.unit)
            to = self._upload(self._record(target, other))
        self._add(
            kind,
            part,
            cells,
            packed,
            turn=turn,
            flags=flags,
            target=to,
            late=late,
            shares_gpu=shares_gpu,
        )

    def add(self, part: Part, packed: int, rows: Any = None) -> None:
        """Add the items that sum what lies at `packed` to a part, whose cells are all different.

        Of a part of places, `rows` says which of them are meant; default: all.
        """
        dtype = self._layouts[part.field].dtype
        # A complex number is two that are added by themselves.
        size = dtype.itemsize // (2 if dtype.kind == "c" else 1)
        steps = [prod(part.shape[axis + 1 :]) * dtype.itemsize for axis in range(len(part.shape))]
        whole = Layout(part.shape, tuple(steps), dtype, None)
        source = Part.of_box(part.field, whole, Box((0,) * len(part.shape), part.shape))
        if rows is not None and part.indices is not None:
            source = Part.of_indices(part.field, whole, part.axis, rows)
            layout = self._layouts[part.field]
            part = Part.of_indices(part.field, layout, part.axis, part.indices[rows])
        cells, there = self._cells(part, size), StridedCells.of(source, whole, size)
        if not cells.unit == there.unit == size:
            raise UnsupportedError(f"a field of {dtype} is not aligned to its elements")
        element = _ELEMENTS[f"{'f' if dtype.kind in 'fc' else 'i'}{size}"]
        target = self._upload(self._record(source, there))
        self._add(UNPACK, part, cells, packed, target=target, element=element)

    def signal(self, kind: int, flag: int, late: int = 0) -> None:
        """Add an item without units: a flag alone."""
        part = _PART.pack(*[0] * (5 + 2 * AXES), 1)
        self._append(0, kind, ITEM.pack(part, 0, 0, flag, late, 0, 0, 0, kind, 0, 0))

    def load(self) -> tuple[int, int]:
        """Copy it to the GPU; return where the items are, and how many.

        Each item that waits comes after the one that it waits for, in the order of all ranks: the
        k-th item of a part is pushed at the time k, and waited for later.
        """
        items = [item for _, item in sorted(self._items, key=lambda each: each[0])]
        return self._upload(b"".join(items) or bytes(ITEM.size)), len(items)

    def _append(self, index: int, kind: int, item: bytes) -> None:
        self._items.append((2 * index + (2 * _AHEAD + 1 if kind in (UNPACK, GET_LL) else 0), item))

    def _cells(self, part: Part, most: int) -> StridedCells:
        return StridedCells.of(part, self._layouts[part.field], min(most, self._most[part.field]))

    def _record(self, part: Part, cells: StridedCells) -> bytes:
        rest = [0] * (AXES - len(cells.steps))
        return _PART.pack(
            cells.first,
            *cells.steps,
            *rest,
            0 if part.indices is None else self._upload(part.indices),
            *cells.extents,
            *rest,
            len(cells.extents),
            cells.along,
            part.field,
            cells.unit,
        )

    def _add(
        self,
        kind: int,
        part: Part,
        cells: StridedCells,
        packed: int,
        *,
        turn: int = 0,
        flags: Sequence[int] | None = None,
        target: int = 0,
        element: int = 0,
        late: int = 0,
        shares_gpu: bool = False,
    ) -> None:
        record = self._record(part, cells)
        pieces = chunks(part.nbytes, shares_gpu=shares_gpu)
        for index, (begin, nbytes) in enumerate(pieces):
            flag = flags[index] if flags else 0
            first, count = begin // cells.unit, nbytes // cells.unit
            where = packed, turn, flag, late, target
            self._append(index, kind, ITEM.pack(record, *where, first, count, kind, element, 0))

"""The seams of all ranks as integers: boxes of their fields, turned and cut into messages."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpishare.errors import grouped
from mpishare.halo.seam import PackedSeam, box_in
from mpishare.plans.cells import Box, Turn, meet
from mpishare.plans.message import Factors, Part, gather_messages
from mpishare.plans.rings import Cut, Slide

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mpishare.plans.layout import FieldLayout
    from mpishare.plans.message import Message

    Layouts = Sequence[Sequence[FieldLayout]]

Field = tuple[int, int]
"""A rank, and one of its fields."""


class Read(NamedTuple):
    """A seam whose boxes are in their fields."""

    name: str  # in errors
    reader: Field
    into: Box
    pieces: Sequence[tuple[Field, Box]]
    wanted: tuple[int, ...]  # the cells of `into` along the axes of the source
    seam: PackedSeam

    @property
    def turn(self) -> Turn | None:
        """How the axes of `into` lie in the source; None where they are as there."""
        axes, flip = tuple(self.seam.axes), tuple(self.seam.flip)
        return Turn(axes, flip) if flip or axes != tuple(range(len(axes))) else None

    @property
    def length(self) -> int:
        """Of the ring."""
        along: Any = self.seam.along
        return sum(int(box.shape[along]) for _, box in self.pieces)


def find_reads(
    seams: Sequence[Sequence[Sequence[Any]]], layouts: Layouts, dtypes: Sequence[Sequence[str]]
) -> list[Read]:
    """Return the seams of all ranks in their order, or raise the same error on each."""
    reads = [
        _read(f"seam {number} of rank {rank}", rank, PackedSeam(*packed), layouts, dtypes)
        for rank, each in enumerate(seams)
        for number, packed in enumerate(each)
    ]
    _require_apart(reads)
    return reads


def _read(
    name: str, rank: int, seam: PackedSeam, layouts: Layouts, dtypes: Sequence[Sequence[str]]
) -> Read:
    into, reader = Box.unpack(seam.into), (rank, seam.field)
    shape = layouts[rank][seam.field].shape
    name = f"{name}, into field {seam.field} of shape {shape} {_text(into)},"
    extents, pieces = into.shape, []
    wanted = tuple(extents[seam.axes.index(axis)] for axis in range(len(shape)))
    for peer, field, spans in seam.pieces:
        if not 0 <= peer < len(layouts):
            raise ValueError(f"{name} names rank {peer}; there are 0 to {len(layouts) - 1}")
        if not 0 <= field < len(layouts[peer]):
            raise ValueError(
                f"{name} names field {field} of rank {peer}, which has {len(layouts[peer])}"
            )
        there, kinds = layouts[peer][field].shape, (dtypes[rank][seam.field], dtypes[peer][field])
        if len(there) != len(shape) or len({*kinds}) > 1:
            raise ValueError(
                f"{name} reads field {field} of rank {peer}, of {kinds[1]} and shape {there}, and "
                f"its own is of {kinds[0]}: both have one dtype and as many axes"
            )
        box = box_in(f"{name} source, field {field} of rank {peer},", spans, there)
        pieces.append(((peer, field), box))
        pairs = enumerate(zip(box.shape, wanted, strict=True))
        if any(has != wants for axis, (has, wants) in pairs if axis != seam.along):
            raise ValueError(
                f"{name} reads {_text(box)} of field {field} of rank {peer}: {box.shape} "
                f"cells, and with axes={tuple(seam.axes)} it wants {wanted}"
            )
    read = Read(name, reader, into, pieces, wanted, seam)
    if seam.along is not None and 0 not in wanted and not read.length:
        raise ValueError(f"{name} reads a ring of no cells")
    return read


def _require_apart(reads: Sequence[Read]) -> None:
    """Raise `ValueError` if a cell is written twice, or written and read."""
    writes = grouped((read.reader, read) for read in reads)
    sources = grouped((field, (read, box)) for read in reads for field, box in read.pieces)
    for field, writers in writes.items():
        targets = [each.into for each in writers]
        for second, first in np.argwhere(np.tril(meet(targets, targets), -1)):
            raise ValueError(
                f"{writers[second].name} and {writers[first].name} write the same cells: shorten "
                "one of them, or bring corners by a second plan"
            )
        there = sources.get(field, [])
        for at, by in np.argwhere(meet([box for _, box in there], targets)):
            read, box = there[at]
            raise ValueError(
                f"{read.name} reads {_text(box)} of field {field[1]} of rank {field[0]}, in which "
                f"{writers[by].name} writes"
            )


def _text(box: Box) -> str:
    spans = zip(box.lower, box.upper, strict=True)
    return f"[{', '.join(f'{low}:{high}' for low, high in spans)}]"


def messages_of(
    reads: Sequence[Read], rank: int, layouts: Layouts, shifts: Mapping[str, int]
) -> tuple[list[Message], list[Message]]:
    """Return the messages of a rank: one for each peer, with its parts in the order of the seams.

    `shifts` numbers the names of shifts.
    """
    sends, recvs = [], []
    for read in reads:
        if rank == read.reader[0] or any(rank == peer for (peer, _), _ in read.pieces):
            for end in _ends(read, shifts):
                if rank == end.source[0]:
                    part = end.part(read, layouts, is_source=True)
                    sends.append((0, read.reader[0], part))
                if rank == read.reader[0]:
                    part = end.part(read, layouts, is_source=False)
                    recvs.append((0, end.source[0], part))
    return gather_messages(sends), gather_messages(recvs)


class _Ends(NamedTuple):
    """The two boxes of a part: all of a seam, or what a piece of a ring gives to it."""

    source: Field
    box: Box
    into: Box
    shape: tuple[int, ...]  # as it travels
    slide: Slide | None = None  # of the end that is the piece

    def part(self, read: Read, layouts: Layouts, *, is_source: bool) -> Part:
        rank, field = self.source if is_source else read.reader
        far = read.reader[1] if is_source else self.source[1]
        layout, box = layouts[rank][field], self.box if is_source else self.into
        return Part(
            field,
            self.shape,
            prod(self.shape) * layout.dtype.itemsize,
            box.slices,
            None if self.slide else box,
            far=None if far == field else far,
            turn=None if is_source else read.turn,
            far_turn=read.turn if is_source else None,
            factors=_factors(read.seam, layout.dtype, is_adjoint=is_source),
            slide=self.slide and self.slide._replace(is_source=is_source),
        )


def _factors(seam: PackedSeam, dtype: Any, *, is_adjoint: bool) -> Factors | None:
    """Return what is applied to the cells that arrive; at the source, on their way back.

    None at both ends or at none, since both must know whether cells only move.
    """
    if not any(seam.factors):
        return None
    scale, offset = (
        None if each is None else np.frombuffer(bytes.fromhex(each), dtype).reshape(())
        for each in seam.factors
    )
    if is_adjoint:
        return Factors(None if scale is None else np.conj(scale), None)
    return Factors(scale, offset)


def _ends(read: Read, shifts: Mapping[str, int]) -> Iterator[_Ends]:
    """Yield the parts of a seam, those of a ring along it."""
    seam, shape = read.seam, read.wanted
    if not prod(shape):
        return
    if seam.along is None:
        ((source, box),) = read.pieces
        yield _Ends(source, box, read.into, shape)
        return
    axis, length = seam.along, read.length
    count, place = shape[axis], seam.start % length
    last = (place if seam.shift is None else length - 1) + count
    first = 0
    while first < last:
        for source, box in read.pieces:
            extent = box.shape[axis]
            if seam.shift is None:
                yield from _cut(read, source, box, Cut.of(place, count, first, extent))
            elif extent:
                slide = Slide(
                    axis, shifts[seam.shift], seam.start, length, count, first, extent, True
                )
                room = (*shape[:axis], min(count, extent), *shape[axis + 1 :])
                yield _Ends(source, box, read.into, room, slide)
            first += extent


def _cut(read: Read, source: Field, box: Box, cut: Cut) -> Iterator[_Ends]:
    """Yield what a piece gives of a ring that has no shift."""
    if not cut.ncells:
        return
    axis: Any = read.seam.along
    target = read.seam.axes.index(axis)
    first, extent = cut.target, read.into.shape[target]
    if target in read.seam.flip:
        first = extent - first - cut.ncells
    into = read.into.cut(target, first, first + cut.ncells)
    part = box.cut(axis, cut.source, cut.source + cut.ncells)
    yield _Ends(source, part, into, part.shape)

"""MPI messages whole or in pieces: pieces let copies overlap with messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mpishare.plans.layout import FieldLayout
    from mpishare.plans.message import Message, Part

    Layouts = Sequence[Sequence[FieldLayout]]

# Large enough that a stage's cost on the host is small next to its copies. GPU memory is packed
# and sent faster.
_HOST_PIECE_NBYTES, _GPU_PIECE_NBYTES = 1 << 20, 8 << 20
MAX_STAGES = 16


def split(
    messages: Sequence[Message], layouts: Layouts, rank: int, most: int, *, on_gpu: bool
) -> Iterator[list[Message]]:
    """Yield the messages of each stage; both ends cut alike, into `most` pieces at most.

    With GPU memory (`on_gpu`), messages that neither end packs are not cut.
    """
    mine = layouts[rank]
    counts = [_count(each, mine, layouts[each.peer], most, on_gpu=on_gpu) for each in messages]
    for number in range(max(counts, default=0)):
        pieces = [
            message.piece(mine, number, count) if count > 1 else message
            for message, count in zip(messages, counts, strict=True)
            if number < count
        ]
        stage = [piece for piece in pieces if piece.parts]
        if stage:
            yield stage


def _count(
    message: Message,
    mine: Sequence[FieldLayout],
    theirs: Sequence[FieldLayout],
    most: int,
    *,
    on_gpu: bool,
) -> int:
    if on_gpu and is_in_one_piece(message, mine, theirs):
        return 1
    nbytes = _GPU_PIECE_NBYTES if on_gpu else _HOST_PIECE_NBYTES
    return max(1, min(message.nbytes // nbytes, most))


def is_in_one_piece(
    message: Message, mine: Sequence[FieldLayout], theirs: Sequence[FieldLayout] | None = None
) -> bool:
    """Whether a message's cells are contiguous, in the order of travel, at this end, or at both.

    Of named places the other end is unknown.
    """
    if len(message.parts) != 1:
        return False
    (part,) = message.parts
    if theirs is not None and part.axis is not None:
        return False
    ends = [mine[part.field], *([] if theirs is None else [theirs[part.far_field]])]
    return part.box is not None and all(_is_row(part, layout) for layout in ends)


def _is_row(part: Part, layout: FieldLayout) -> bool:
    cells, step = part.cells(layout), layout.dtype.itemsize
    for extent, stride in zip(reversed(cells.shape), reversed(cells.strides), strict=True):
        if extent != 1:
            if stride != step:
                return False
            step *= extent
    return True

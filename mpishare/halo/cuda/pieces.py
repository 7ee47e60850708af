"""Large messages by MPI in pieces, so that copies overlap with messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mpishare.halo.layout import FieldLayout
    from mpishare.halo.message import Message

# Long enough that what a stage costs the host is little next to its copies. GPU memory is packed
# and sent faster.
_HOST_PIECE_NBYTES, _GPU_PIECE_NBYTES = 1 << 20, 8 << 20
MAX_STAGES = 16


def split(
    messages: Sequence[Message], layouts: Sequence[FieldLayout], most: int, *, on_gpu: bool
) -> Iterator[list[Message]]:
    """Yield the messages of each stage. Both ends cut alike.

    Parameters
    ----------
    messages : sequence of Message
        Those of one direction.
    layouts : sequence of FieldLayout
        This rank's fields.
    most : int
        Into how many pieces a message may be cut.
    on_gpu : bool
        Where their buffers are.
    """
    nbytes = _GPU_PIECE_NBYTES if on_gpu else _HOST_PIECE_NBYTES
    counts = [max(1, min(message.nbytes // nbytes, most)) for message in messages]
    for number in range(max(counts, default=0)):
        pieces = [
            message.piece(layouts, number, count) if count > 1 else message
            for message, count in zip(messages, counts, strict=True)
            if number < count
        ]
        stage = [piece for piece in pieces if piece.parts]
        if stage:
            yield stage

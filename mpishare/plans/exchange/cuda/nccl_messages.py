"""The messages of a plan on GPUs that NCCL takes to other nodes, on the stream of the call.

Cells that are contiguous at this end go straight out of fields and into ghosts; others are packed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mpishare.plans.exchange.cuda.mpi_buffers import places_in
from mpishare.plans.gpu.graphs import key_of
from mpishare.plans.message import ALIGN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mpishare.backends.nccl import Move
    from mpishare.backends.suballocator import Suballocation
    from mpishare.plans.comm import PlanComm
    from mpishare.plans.exchange.cuda.mpi_buffers import Packed
    from mpishare.plans.gpu.nccl import NcclRanks
    from mpishare.plans.layout import FieldLayout
    from mpishare.plans.message import Message

MIN_OWN_NBYTES = 256 << 10
"""Parts of this size are messages of their own, so that each end may leave them where they are."""
_MAX_BOUND = 64


class _Piece(NamedTuple):
    """A message as NCCL gets it: some parts of one of the plan's."""

    packed: Move
    parts: Packed
    field: int | None  # whose cells need no packing at this end, unless its address is odd
    offset: int

    def move(self, addresses: tuple[int, ...] | None) -> Move:
        """Return where its bytes are, given the addresses of fields that stay where they are."""
        if addresses is None or self.field is None:
            return self.packed
        return addresses[self.field] + self.offset, *self.packed[1:]


class NcclMessages:
    """Messages of fields at any addresses, all sent and received by one kernel.

    The buffers need no second half as those of streams that wait by flags: all three kernels of a
    call follow those of the call before. `bound` has the function that sends and receives on a
    stream, by `key_of` the fields' addresses.
    """

    def __init__(
        self,
        comm: PlanComm,
        ranks: NcclRanks,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        layouts: Sequence[FieldLayout],
        *,
        packs: bool,
    ) -> None:
        self._suballocator, self._ranks = comm.context.suballocator, ranks
        self._layouts, self._packs = layouts, packs
        self._blocks: list[Suballocation] = []
        self._sends, self._recvs = ([*self._place(each)] for each in (sends, recvs))
        self.bound: dict[object, Callable[[int], None]] = {}
        self.nbytes = sum(block.nbytes for block in self._blocks)

    def packed(self, *, are_aligned: bool) -> tuple[list[Packed], list[Packed]]:
        """Return the parts to pack and to unpack, for fields at multiples of `ALIGN` or at any."""
        sends, recvs = (
            [each.parts for each in pieces if not are_aligned or each.field is None]
            for pieces in (self._sends, self._recvs)
        )
        return sends, recvs

    def bind(self, addresses: tuple[int, ...]) -> Callable[[int], None]:
        """Return the function that sends and receives for fields at these addresses."""
        key = key_of(addresses)
        found = self.bound.get(key)
        if found is None:
            if len(self.bound) == _MAX_BOUND:
                self.bound.pop(next(iter(self.bound)))
            given = None if any(each % ALIGN for each in addresses) else addresses
            sends, recvs = ([p.move(given) for p in each] for each in (self._sends, self._recvs))
            found = self.bound[key] = self._ranks.bind(sends, recvs)
        return found

    def close(self) -> None:
        self.bound.clear()
        while self._blocks:
            self._blocks.pop().close()

    def _place(self, messages: Sequence[Message]) -> Iterator[_Piece]:
        """Yield the pieces, each with its packed place; the order is that of both ends."""
        for message in sorted(messages, key=lambda message: message.tag):
            for piece in [message] if self._packs else _pieces(message):
                block = self._suballocator.allocate(max(piece.nbytes, 1))
                self._blocks.append(block)
                nbytes, parts = places_in(piece, block.address)
                field, offset = self._stays(piece)
                yield _Piece((block.address, nbytes, message.peer), parts, field, offset)

    def _stays(self, piece: Message) -> tuple[int | None, int]:
        """Return the field and the offset of a piece that needs no packing, else None."""
        part = piece.parts[0]
        if not self._packs and piece.is_contiguous(self._layouts):
            offset = part.cells(self._layouts[part.field]).offset
            if offset % ALIGN == 0:  # NCCL copies others byte by byte
                return part.field, offset
        return None, 0


def _pieces(message: Message) -> Iterator[Message]:
    """Split a message, alike at both ends: large parts alone, small ones together."""
    small = [part for part in message.parts if part.nbytes < MIN_OWN_NBYTES]
    for parts in ([part] for part in message.parts if part.nbytes >= MIN_OWN_NBYTES):
        yield message._replace(parts=tuple(parts))
    if small:
        yield message._replace(parts=tuple(small))

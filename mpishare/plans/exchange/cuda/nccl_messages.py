"""The messages of a plan on GPUs that NCCL takes to other nodes, on the stream of the call.

Cells that are contiguous at this end go straight out of fields and into ghosts; others are packed.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from mpishare.backends.driver import is_plain
from mpishare.backends.nccl import ANY_NBYTES, most_captured_alone
from mpishare.plans.exchange.cuda.mpi_buffers import places_in
from mpishare.plans.message import ALIGN
from mpishare.runtime.route import NCCL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mpishare.backends.nccl import Move
    from mpishare.backends.suballocator import Suballocation
    from mpishare.plans.comm import PlanComm
    from mpishare.plans.exchange.cuda.direction import Direction
    from mpishare.plans.exchange.cuda.mpi_buffers import Packed
    from mpishare.plans.gpu.nccl import NcclRanks
    from mpishare.plans.message import Message

MIN_OWN_NBYTES = 256 << 10
"""Parts of this size are messages of their own, so that each end may leave them where they are."""
_MAX_BOUND = 64


class _Piece(NamedTuple):
    """A message as NCCL gets it: some parts of one of the plan's."""

    packed: Move
    parts: Packed
    field: int | None  # whose cells need no packing at this end, if `may_stay`
    offset: int

    def move(self, addresses: tuple[int, ...] | None) -> Move:
        """Return where its bytes are, given the addresses of fields that stay where they are."""
        if addresses is None or self.field is None:
            return self.packed
        return addresses[self.field] + self.offset, *self.packed[1:]


class NcclMessages:
    """Messages of the fields at the addresses in `pointers`, all sent and received by one kernel.

    The buffers need no second half as those of streams that wait by flags: all three kernels of a
    call follow those of the call before. `may_be_captured`: on this rank alone.
    """

    def __init__(
        self, comm: PlanComm, ranks: NcclRanks, direction: Direction, pointers: Any
    ) -> None:
        self._suballocator, self.ranks = comm.context.suballocator, ranks
        self._layouts, self._packs = direction.layouts, direction.packs
        self._pointers = pointers
        self._blocks: list[Suballocation] = []
        self._sends, self._recvs = ([*self._place(each)] for each in direction.by(NCCL))
        pieces = self._sends + self._recvs
        most = max((each.packed[1] for each in pieces), default=0)
        self.may_be_captured = most <= most_captured_alone()
        # Any others are taken alike out of all memory.
        large = [each for each in pieces if each.packed[1] > ANY_NBYTES]
        self._fields = {each.field for each in large if each.field is not None}
        self.may_stay = functools.lru_cache(_MAX_BOUND)(self._may_stay)
        self._bound = functools.lru_cache(_MAX_BOUND)(self._bind)
        self.nbytes = sum(block.nbytes for block in self._blocks)

    def _may_stay(self, addresses: tuple[int, ...]) -> bool:
        """Whether fields are aligned, and cells that need no packing may stay in them.

        Of memory that NCCL maps in captures, both ends would have to be: at the other one the same
        cells may be packed.
        """
        is_odd = any(address % ALIGN for address in addresses)
        return not is_odd and all(is_plain(addresses[field]) for field in self._fields)

    def packed(self, *, may_stay: bool) -> tuple[list[Packed], list[Packed]]:
        """Return the parts to pack and to unpack, for fields whose cells may stay, or not."""
        sends, recvs = (
            [each.parts for each in pieces if not may_stay or each.field is None]
            for pieces in (self._sends, self._recvs)
        )
        return sends, recvs

    def enqueue(self, stream: int) -> None:
        self._bound(tuple(self._pointers))(stream)

    def _bind(self, addresses: tuple[int, ...]) -> Callable[[int], None]:
        given = addresses if self.may_stay(addresses) else None
        sends, recvs = ([p.move(given) for p in each] for each in (self._sends, self._recvs))
        return self.ranks.bind(sends, recvs)

    def close(self) -> None:
        self._bound.cache_clear()
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
            # NCCL copies others byte by byte: of a few bytes that is faster than to pack them.
            if piece.nbytes <= ANY_NBYTES or offset % ALIGN == 0:
                return part.field, offset
        return None, 0


def _pieces(message: Message) -> Iterator[Message]:
    """Split a message, alike at both ends: large parts alone, small ones together."""
    small = [part for part in message.parts if part.nbytes < MIN_OWN_NBYTES]
    for parts in ([part] for part in message.parts if part.nbytes >= MIN_OWN_NBYTES):
        yield message._replace(parts=tuple(parts))
    if small:
        yield message._replace(parts=tuple(small))

"""Where packed cells lie between two ranks of a node: one decision, the same at both ends.

Pure integers: every rank works it out for every rank, from what all were told.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mpishare.halo.cuda.work_items import are_words, chunks
from mpishare.halo.message import PartKey, padded
from mpishare.memory.handle import Handle

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from mpishare.backends.suballocator import Suballocation
    from mpishare.halo.plan_comm import PlanComm

_FLAG_NBYTES = 32
_SLAB_ALIGN = 128

Key = tuple[int, int, int]
"""A part of a message to some rank: its sender, the message's tag, the field."""


@dataclass
class StagingLayout:
    """What one rank receives in its own GPU memory.

    Attributes
    ----------
    flags : dict of (sender, tag, field) to list of int, bytes
        Where the flags of the items of a fused part are, unless it travels as words. A sender
        without parts has one flag, at (sender, -1, -1).
    fused, copied : dict of (sender, tag, field) to int, bytes
        Where the packed cells or words are; of fused ones the first of two copies.
    turn : int, bytes
        From the first copy to the second.
    nbytes : int, bytes
        Of the whole; the flags come first.
    """

    flags: dict[Key, list[int]] = field(default_factory=dict)
    fused: dict[Key, int] = field(default_factory=dict)
    copied: dict[Key, int] = field(default_factory=dict)
    flags_nbytes: int = 0
    turn: int = 0
    nbytes: int = 0


def slab_of(
    told: Sequence[Any],
    routes: Sequence[dict[int, str]],
    units: Mapping[PartKey, int],
    ranks_here: Iterable[int],
    rank: int,
    crowded: Container[int] = (),
) -> StagingLayout:
    """Return how the slab of a rank is laid out.

    Parameters
    ----------
    told : sequence
        For each rank of the plan, `Message.as_data` of what it sends, and the route.
    routes : sequence of dict of int to str
        For each rank, its route to each peer.
    units : mapping of (sender, receiver, tag, field) to int, bytes
        For each fused part what both of its ends can move at once.
    ranks_here : iterable of int
        The ranks of the node.
    crowded : container of int
        Those that share a GPU.
    """
    slab = StagingLayout()
    incoming = [
        ((sender, tag, number), nbytes, route)
        for sender in ranks_here
        for peer, tag, parts, route in told[sender]
        if peer == rank
        for number, nbytes, _ in parts
    ]
    words = {
        (sender, tag, number)
        for (sender, tag, number), nbytes, route in incoming
        if route == "fused" and are_words(nbytes, units[PartKey(sender, rank, tag, number)])
    }
    flags = 0
    for key, nbytes, route in incoming:
        if route == "fused" and key not in words:
            shares_gpu = rank in crowded or key[0] in crowded
            count = len(list(chunks(nbytes, shares_gpu=shares_gpu)))
            slab.flags[key] = [_FLAG_NBYTES * (flags + index) for index in range(count)]
            flags += count
    heard = {sender for (sender, _, _), _, route in incoming if route == "fused"}
    for sender in ranks_here:
        if routes[rank].get(sender) == "fused" and sender not in heard:
            slab.flags[sender, -1, -1] = [_FLAG_NBYTES * flags]
            flags += 1
    at = slab.flags_nbytes = -(-_FLAG_NBYTES * flags // _SLAB_ALIGN) * _SLAB_ALIGN
    begin = at
    for key, nbytes, route in incoming:
        if route == "fused":
            slab.fused[key] = at
            at += padded(2 * nbytes if key in words else nbytes)
    slab.turn = -(-(at - begin) // _SLAB_ALIGN) * _SLAB_ALIGN
    at = begin + 2 * slab.turn
    for key, nbytes, route in incoming:
        if route == "copy":
            slab.copied[key] = at
            at += padded(nbytes)
    slab.nbytes = at
    return slab


def pinned_of(
    told: Sequence[Any], ranks_here: Iterable[int]
) -> tuple[dict[tuple[int, Key], int], int]:
    """Return where packed cells lie in host memory, by receiver and part, and the bytes of all."""
    found: dict[tuple[int, Key], int] = {}
    at = 0
    for sender in ranks_here:
        for peer, tag, parts, route in told[sender]:
            for number, nbytes, _ in parts if route == "pinned" else ():
                found[peer, (sender, tag, number)] = at
                at += padded(nbytes)
    return found, at


class DeviceStaging:
    """A slab of this rank and those of its neighbors, made in two steps.

    Parameters
    ----------
    ranks : PlanComm
        The plan's.
    call : str
        For errors.
    nbytes : dict of int to int, bytes
        For this rank and each neighbor on the node whose memory is stored to, its slab.
    neighbors : iterable of int
        Those neighbors.
    """

    def __init__(
        self, ranks: PlanComm, call: str, nbytes: dict[int, int], neighbors: Iterable[int]
    ) -> None:
        self._ranks = ranks
        self._call = call
        self._nbytes = nbytes
        self._neighbors = neighbors
        self._pieces: dict[int, Suballocation] = {}

    def create(self) -> str:
        """Make this rank's slab, zeroed, and return its handle. Local."""
        rank, context = self._ranks.rank, self._ranks.context
        mine = self._nbytes[rank]
        if not mine:
            return ""
        piece, handle = context.suballocator.cut(mine, context.handle)
        self._pieces[rank] = piece
        piece.zero()
        context.synchronize(None, self._call)
        return handle

    def open(self, told: Sequence[str]) -> None:
        """Map the neighbors' slabs, given every rank's handle. Local."""
        context, ranks_here = self._ranks.context, self._ranks.ranks_here
        for rank in self._neighbors:
            if self._nbytes[rank]:
                handle = Handle.unpack(
                    told[rank],
                    backend=context.backend.name,
                    nonce=context.nonces[ranks_here[rank]],
                    nbytes=self._nbytes[rank],
                )
                self._pieces[rank] = context.suballocator.open(handle)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's slab."""
        mine = self._pieces.get(self._ranks.rank)
        return 0 if mine is None else mine.nbytes

    def address_of(self, rank: int) -> int:
        """Return where the slab of a rank is mapped here."""
        return self._pieces[rank].address

    def release(self) -> None:
        """Unmap what others own. Local."""
        for rank in [rank for rank in self._pieces if rank != self._ranks.rank]:
            self._pieces.pop(rank).close()

    def close(self) -> None:
        """Free what this rank owns. Local, once all others have released."""
        if self._ranks.rank in self._pieces:
            self._pieces.pop(self._ranks.rank).close()

"""Shared host memory of one plan: for each rank words, and two packed copies of what it sends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.coordination.counters import SLOT_WORDS

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from mpishare.halo.host.process_read import Key
    from mpishare.halo.message import Part
    from mpishare.halo.plan_comm import PlanComm

_ALIGN = 128  # packed cells of two ranks never share a cache line


class DoubleBuffer:
    """What the plan's ranks on this node have in common. Collective to make.

    Parameters
    ----------
    ranks : PlanComm
        The plan's.
    name : str
        The plan's, for errors.
    nwords : int
        Words of each rank.
    told : sequence
        For each rank of the plan, `Message.as_data` of what it sends, and the route.
    lent : collection of Key
        What needs no copies.

    Attributes
    ----------
    words : dict of int to memoryview
        Each rank's.
    nbytes : int, bytes
        Of all, once for the node.
    """

    def __init__(
        self, ranks: PlanComm, name: str, nwords: int, told: Sequence[Any], lent: Collection[Key]
    ) -> None:
        nwords = -(-nwords // SLOT_WORDS) * SLOT_WORDS
        at = 8 * nwords * len(ranks.ranks_here)
        self._turns: dict[int, int] = {}  # for each rank, from its first copy to its second
        self._offsets: dict[Key, int] = {}  # of each part in the first
        for rank in ranks.ranks_here:
            begin = at
            for peer, tag, parts, route in told[rank]:
                for field, nbytes, _ in parts if route == "host" and peer != rank else ():
                    if (rank, peer, tag, field) not in lent:
                        self._offsets[rank, peer, tag, field] = at
                        at += -(-nbytes // _ALIGN) * _ALIGN
            self._turns[rank] = at - begin
            at += at - begin
        self._memory = ranks.map_on_all_ranks(name, at)
        self._memory.close_file()
        self.nbytes = self._memory.nbytes
        whole = memoryview(self._memory.buffer)
        self.words: dict[int, memoryview[int]] = {
            rank: whole[8 * nwords * place : 8 * nwords * (place + 1)].cast("Q")
            for place, rank in enumerate(ranks.ranks_here)
        }

    def copies(
        self, part: Part, sender: int, receiver: int, tag: int, dtype: np.dtype[Any]
    ) -> list[np.ndarray[Any, Any]]:
        """Return both packed copies of a part, for even epochs and for odd ones. Local."""
        at, turn = self._offsets[sender, receiver, tag, part.field], self._turns[sender]
        base = np.frombuffer(self._memory.buffer, dtype=np.uint8)
        return [
            np.ndarray(part.shape, dtype, buffer=base, offset=begin) for begin in (at, at + turn)
        ]

    def close(self) -> None:
        """Unmap. Local; views of the words that are still held keep what they see."""
        self.words = {}
        self._memory.close()

"""Staging in GPU memory: a slab on each rank, mapped by those that store there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpishare.handles import Handle

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mpishare.halo.ranks import Ranks
    from mpishare.pieces import Piece


class Slabs:
    """A slab of this rank and those of its neighbors, made in two steps.

    Parameters
    ----------
    ranks : Ranks
        The plan's.
    call : str
        For errors.
    nbytes : dict of int to int, bytes
        For this rank and each neighbor on the node whose memory is stored to, its slab.
    neighbors : iterable of int
        Those neighbors.
    """

    def __init__(
        self, ranks: Ranks, call: str, nbytes: dict[int, int], neighbors: Iterable[int]
    ) -> None:
        self._ranks = ranks
        self._call = call
        self._nbytes = nbytes
        self._neighbors = neighbors
        self._pieces: dict[int, Piece] = {}

    def create(self) -> str:
        """Make this rank's slab, zeroed, and return its handle. Local."""
        rank, ground = self._ranks.rank, self._ranks.ground
        mine = self._nbytes[rank]
        if not mine:
            return ""
        piece, handle = ground.pieces.cut(mine, ground.handle)
        self._pieces[rank] = piece
        piece.zero()
        ground.synchronize(None, self._call)
        return handle

    def open(self, told: Sequence[str]) -> None:
        """Map the neighbors' slabs, given every rank's handle. Local."""
        ground, team = self._ranks.ground, self._ranks.team
        for rank in self._neighbors:
            if self._nbytes[rank]:
                handle = Handle.unpack(
                    told[rank],
                    backend=ground.backend.name,
                    nonce=ground.nonces[team[rank]],
                    nbytes=self._nbytes[rank],
                )
                self._pieces[rank] = ground.pieces.open(handle)

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

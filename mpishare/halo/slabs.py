"""Staging in GPU memory: a slab on each rank, mapped by those that store there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishare.handles import Handle

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mpishare.backends import Memory
    from mpishare.halo.ranks import Ranks


class Slabs:
    """A slab of this rank and those of its neighbors. Collective, host-blocking.

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
        self._memories: dict[int, Memory] = {}
        self._rank = ranks.rank
        ground, mine = ranks.ground, nbytes[ranks.rank]
        backend = ground.backend

        def create() -> str:
            if not mine:
                return ""
            memory = self._memories[ranks.rank] = backend.allocate(mine)
            memory.array((mine,), "u1").fill(0)
            ground.synchronize(None, call)
            return ground.handle(backend.publish(memory), mine, memory.nbytes)

        def open_others() -> None:
            for rank in neighbors:
                if nbytes[rank]:
                    handle = Handle.unpack(
                        told[rank],
                        backend=backend.name,
                        nonce=ground.nonces[ranks.team[rank]],
                        nbytes=nbytes[rank],
                    )
                    memory = backend.open(handle.token, handle.capacity, handle.uuid)
                    self._memories[rank] = memory

        try:
            told: list[Any] = ranks.step(call, create)
            ranks.step(call, open_others)
        except BaseException:
            self.undo(ranks, call)
            raise

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's slab."""
        mine = self._memories.get(self._rank)
        return 0 if mine is None else mine.nbytes

    def address_of(self, rank: int) -> int:
        """Return where the slab of a rank is mapped here."""
        return self._memories[rank].address

    def release(self) -> None:
        """Unmap what others own. Local."""
        for rank in [rank for rank in self._memories if rank != self._rank]:
            self._memories.pop(rank).close()

    def close(self) -> None:
        """Free what this rank owns. Local, once all others have released."""
        if self._rank in self._memories:
            self._memories.pop(self._rank).close()

    def undo(self, ranks: Ranks, call: str) -> None:
        """Free everything after a failure that all ranks know of. Collective."""
        ranks.step(call, self.release)
        self.close()

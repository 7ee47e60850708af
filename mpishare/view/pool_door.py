"""The door of a pool's owner: processes that are not ranks of its node open blocks through it.

Such a process has no row in the `BlockTable`. The door counts for it, in its thread, which blocks
it holds. The connection is the lease: the kernel ends it with the process.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from mpishare.windows.publisher import DETACH_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mpishare.backends import Backend
    from mpishare.memory.fd_server import Client, FdServer
    from mpishare.windows.pool_blocks import OwnBlocks

# Version of the messages of this door, and of handles.
VERSION = 2

MOST_OPENERS = 256


class PoolDoor:
    """Lends the memory of a pool to processes outside the node.

    It counts in `held_outside` of the blocks, in the door's thread, before that looks whether the
    block is alive; the owner reads the count after it has ended the block's generation. As in the
    `BlockTable`, at least one of the two sees the other.
    """

    def __init__(
        self, fd_server: FdServer, key: bytes, backend: Backend, blocks: OwnBlocks
    ) -> None:
        self._table = blocks.table
        self._held = blocks.held_outside
        self._slots: dict[Client, set[int]] = {}  # that each visitor holds
        self._is_ended = False
        self._has_gpu = backend.has_streams
        self._description = {
            "version": VERSION,
            "key": key.hex(),
            "backend": backend.name,
            "uuid": backend.device.uuid if backend.device else "",
        }
        # Now, since the door's thread may call no CUDA. It names the memory of the whole pool.
        self._fds = [blocks.memory.export()]
        try:
            self._opening = fd_server.open("pool", self._answer, self._left, most=MOST_OPENERS)
        except BaseException:
            os.close(self._fds.pop())
            raise
        self.address = self._opening.address

    @property
    def openers(self) -> list[int]:
        """The processes that map the pool."""
        return self._opening.leases()

    def end(self) -> bool:
        """Lend no more blocks; return whether no other process needs the memory any longer.

        Mappings on the host are no hazard to anybody, and stay. Host-blocking, where the memory is
        on a GPU: other processes must unmap it before it is freed.
        """
        if self._has_gpu and not self._is_ended:
            self._is_ended = True
            self._opening.end_leases(DETACH_S)
        return not self._has_gpu or not self.openers

    def close(self) -> None:
        """End all leases. May be repeated."""
        self._opening.shut()
        while self._fds:
            os.close(self._fds.pop())

    # --- in the door's thread

    def _left(self, visitor: Client) -> None:
        slots = self._slots.pop(visitor, set())
        self._release_slots(slots, list(slots))

    def _answer(
        self, request: dict[str, Any], visitor: Client
    ) -> tuple[dict[str, Any] | None, Sequence[int]]:
        slots = self._slots.setdefault(visitor, set())
        if "released" in request:
            self._release_slots(slots, request["released"])
            return None, []
        if "hold" in request:
            return {"is_held": self._hold(slots, *request["hold"])}, []
        return self._description, self._fds

    def _hold(self, slots: set[int], slot: int, generation: int) -> bool:
        if not self._table.has(slot) or not generation % 2:
            return False
        if slot in slots:
            return self._table.is_alive(slot, generation)
        slots.add(slot)
        self._held[slot] = self._held.get(slot, 0) + 1
        is_alive = self._table.is_alive(slot, generation)
        if not is_alive:
            self._release_slots(slots, [slot])
        return is_alive

    def _release_slots(self, slots: set[int], given: Iterable[int]) -> None:
        for slot in slots.intersection(given):
            slots.remove(slot)
            self._held[slot] -= 1
            if not self._held[slot]:
                del self._held[slot]

"""The door of a pool's owner: processes that are no ranks of its node get there what ranks have.

That is the memory, the key, and the `BlockTable` with a row of their own. The connection is the
lease of that row: the kernel ends it with the process.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from mpishare.windows.publisher import DETACH_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.backends import Backend
    from mpishare.memory.fd_server import Client, FdServer
    from mpishare.windows.pool_blocks import OwnBlocks

# Version of the messages of this door, and of handles.
VERSION = 3

MOST_OPENERS = 256


class PoolDoor:
    """Lends the memory of a pool to processes outside the node."""

    def __init__(
        self, fd_server: FdServer, key: bytes, backend: Backend, blocks: OwnBlocks
    ) -> None:
        self._table = blocks.table
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
            self._fds.append(self._table.open_file())
            self._opening = fd_server.open(
                "pool", self._answer, self._table.remove_row, most=MOST_OPENERS
            )
        except BaseException:
            self._close_files()
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
        self._close_files()

    def _close_files(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def _answer(self, _: dict[str, Any], client: Client) -> tuple[dict[str, Any], Sequence[int]]:
        """Describe the pool, in the server's thread."""
        return self._description, [*self._fds, self._table.add_row(client)]

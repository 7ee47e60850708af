"""The door of a pool's owner: there every other process, rank or not, gets what it opens blocks by.

That is the memory, the key, and the table of the blocks with a row of its own. The connection is
the lease of that row: the kernel ends it with the process.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from mpishare.errors import HandleError
from mpishare.memory.block_table import OpenedTable
from mpishare.memory.fd_client import FdClient
from mpishare.windows.pool_blocks import OpenBlocks
from mpishare.windows.publisher import DETACH_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.backends import Backend
    from mpishare.memory.fd_server import Client, FdServer
    from mpishare.windows.pool_blocks import OwnBlocks

# Version of the messages of this door, and of handles.
_VERSION = 4

_MOST_OPENERS = 256  # outside the node
_N_FILES = 3  # of the memory, of the table of its blocks, and of the process's row in that


class PoolDoor:
    """Lends the memory of a pool to the `nranks` ranks of the node, and to processes outside."""

    def __init__(
        self, fd_server: FdServer, key: bytes, backend: Backend, blocks: OwnBlocks, nranks: int
    ) -> None:
        self._table = blocks.table
        self._is_ended = False
        self._has_gpu = backend.has_streams
        self._description = {
            "version": _VERSION,
            "key": key.hex(),
            "backend": backend.name,
            "uuid": backend.device.uuid if backend.device else "",
        }
        # Now, since the door's thread may call no CUDA. It names the memory of the whole pool.
        self._fds = [blocks.memory.export()]
        try:
            self._fds.append(self._table.open_file())
            most = _MOST_OPENERS + nranks
            self._opening = fd_server.open("pool", self._answer, self._table.remove_row, most=most)
        except BaseException:
            self._close_files()
            raise
        self.address = self._opening.address

    @property
    def openers(self) -> list[int]:
        """The processes outside the node that map the pool."""
        return self._opening.leases("outside")

    def end(self) -> bool:
        """Lend no more blocks; return whether no process outside needs the memory any longer.

        Mappings on the host are no hazard to anybody, and stay. Host-blocking, where the memory is
        on a GPU: other processes must unmap it before it is freed.
        """
        if self._has_gpu and not self._is_ended:
            self._is_ended = True
            self._opening.end_leases(DETACH_S, "outside")
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


def open_door(
    address: str,
    name: str,
    timeout_s: float,
    backend_of: Callable[[dict[str, Any], bytes], Backend],
    memory_barrier: Callable[[], object],
    *,
    is_outside: bool,
) -> tuple[FdClient, bytes, OpenBlocks]:
    """Map a pool of another process; return the lease, the key, and the blocks.

    `backend_of` gets the description and the key, before anything is mapped. Errors call the pool
    by `name`. Raises as `FdClient.ask`; `HandleError` if the owner is of another version.
    """
    client = FdClient(address, name, timeout_s)
    with ExitStack() as undo, ExitStack() as received:
        undo.callback(client.close)
        request = {"version": _VERSION, "outside": is_outside}
        found, fds = client.ask(request, n_files=_N_FILES)
        for fd in fds:
            received.callback(os.close, fd)
        if found.get("version") != _VERSION:
            raise HandleError(
                f"{name} is described in another way than this mpishare expects: run the same one "
                "everywhere"
            )
        key = bytes.fromhex(found["key"])
        backend = backend_of(found, key)
        table = OpenedTable(fds[1:], memory_barrier)
        undo.callback(table.close)
        blocks = OpenBlocks(backend, backend.import_pool(fds[0]), table)
        undo.pop_all()
    return client, key, blocks

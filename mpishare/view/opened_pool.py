"""Arrays of a pool in processes that are not ranks of its node: without MPI, by a handle alone."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from typing import TYPE_CHECKING, Any

from mpishare.backends.host import HostBackend
from mpishare.coordination.poll import poll
from mpishare.errors import HandleError, late
from mpishare.memory.arguments import require_duration
from mpishare.native import memory_barrier
from mpishare.view.readers import open_gpu
from mpishare.windows.pool import enter, pool_here
from mpishare.windows.pool_door import open_door
from mpishare.windows.pool_handle import address_of, unpack

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpishare.backends import Backend
    from mpishare.memory.fd_client import FdClient
    from mpishare.memory.types import Stream

_NAME = "the pool of this handle"
# At most so late is memory on a GPU let go, or memory of a pool that was closed.
_LOOK_S = 0.1

_opened: dict[str, _OpenedPool] = {}  # by address


class _OpenedPool:
    """A pool as this process maps it, once for all of its blocks, when the first of them is opened.

    It stays mapped until it is closed, or its owner has ended, and no array of it is left: a thread
    waits for that.
    """

    def __init__(self, address: str) -> None:
        self.lock = threading.Lock()  # of its own: a stopped owner holds up no other pool
        self.client: FdClient | None = None  # once it is mapped: the lease
        self._address = address
        self._is_over = False

    def is_over(self) -> bool:
        return self._is_over or (self.client is not None and self.client.is_over())

    def open(self, handle: Any, stream: Any, timeout_s: float) -> Any:
        """Open an array, with the lock held. Raises as `open_handle`."""
        if self.client is None:
            try:
                self._map(handle, timeout_s)
            except BaseException:
                self.forget()
                raise
        block, layout = unpack(self._key, handle)
        self._backend.make_current()
        number, keeper = enter(self._backend, "open_handle", stream)
        return self._blocks.open(block, layout, number, keeper)

    def forget(self) -> None:
        """Let another one come in its place."""
        self._is_over = True
        if _opened.get(self._address) is self:
            del _opened[self._address]

    def _map(self, handle: Any, timeout_s: float) -> None:
        def backend_of(found: dict[str, Any], key: bytes) -> Backend:
            unpack(key, handle)  # before anything is mapped
            is_host = found["backend"] == "host"
            self._backend: Backend = HostBackend() if is_host else open_gpu([found["uuid"]])[0]
            return self._backend

        client, self._key, self._blocks = open_door(
            self._address, _NAME, timeout_s, backend_of, memory_barrier(), is_outside=True
        )
        self.client = client
        threading.Thread(
            target=self._serve, args=[client], name="mpishare-opened", daemon=True
        ).start()

    # --- in its thread

    def _serve(self, client: FdClient) -> None:
        """Let go of what was dropped; close the pool when it is over and no array is left."""
        backend = self._backend
        backend.enter_thread()
        while not client.is_over():
            client.wait_until_over(_LOOK_S if backend.has_streams else None)
            if backend.has_streams:
                self._blocks.finish()
        poll(lambda: self._close(client), math.inf, pause_s=_LOOK_S)

    def _close(self, client: FdClient) -> bool:
        with self.lock:
            self._blocks.finish()
            if is_empty := self._blocks.is_empty:
                self.forget()
                self._blocks.close()
                client.close()
            return is_empty


def open_handle(handle: Any, stream: Stream | None = None, *, timeout_s: float = 10.0) -> Any:
    """Open an array of a pool by its handle: the same bytes, no copy. Local, host-blocking.

    In any process of the same user on this machine: needs no MPI and starts none. In a rank of the
    pool's node it does what `Pool.open` does. The first call for a pool asks its owner and maps it,
    which takes some milliseconds on the host; every further one is local.
    The owner reuses the memory when all arrays and views of it are dropped here, and when this
    process ends in whatever way; on CUDA once the work enqueued on `stream` until then is done.
    Nothing orders this process and the owner: open an array when it is written. On CUDA the GPU of
    the array becomes the current one, or another one where this process does not see it. A forked
    child opens handles itself: what it inherits is held by its parent alone.

    Parameters
    ----------
    handle : bytes
        Of `Pool.handle`.
    stream : stream, optional
        On which the array is used. Default: CuPy's current stream. One given as a number must
        outlive the array. Ignored on the host backend.
    timeout_s : float, seconds
        For the answer of the owner.

    Returns
    -------
    cupy.ndarray or numpy.ndarray
        It stays valid after the owner has ended, or has closed the pool.

    Raises
    ------
    HandleError
        If the owner has dropped the array, has closed the pool or has ended; if it is another
        user's; or if the handle is damaged or forged.
    PeerTimeout
        If the owner does not answer.
    CudaError
        If the GPU cannot map the pool.
    UnsupportedError
        If the pool is on a GPU and this process sees none, if the owner has too many visitors, or
        in a stream capture.
    TypeError, ValueError
        If `handle` is not bytes, or `timeout_s` no duration; in the owner's own process.
    """
    require_duration("open_handle failed: ", timeout_s)
    try:
        address = address_of(handle)
        if (pool := pool_here(address)) is not None:
            return pool.open(handle, stream)
        while True:
            opened = _opened.get(address) or _opened.setdefault(address, _OpenedPool(address))
            with _held(opened.lock, timeout_s):
                if not opened.is_over():
                    return opened.open(handle, stream, timeout_s)
                opened.forget()
    except HandleError as error:
        raise HandleError(f"open_handle failed: {error}") from None


@contextlib.contextmanager
def _held(lock: threading.Lock, timeout_s: float) -> Iterator[None]:
    """Hold a lock. Its holder may be this thread, where a handler of a signal calls amid a call."""
    if not lock.acquire(timeout=timeout_s):
        raise late(f"no access to {_NAME}", timeout_s, ": another call waits for its owner")
    try:
        yield
    finally:
        lock.release()


def _forget() -> None:
    """In a fork: the leases are the parent's, and end with it."""
    for pool in _opened.values():
        if pool.client is not None:
            pool.client.close()
    _opened.clear()


os.register_at_fork(after_in_child=_forget)

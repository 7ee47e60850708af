"""Pools: memory that one rank allocates array by array, and others open by a handle.

A window is made by all ranks together. A pool is made once together; after that its owner
allocates, and the other ranks open the arrays whose handles they receive, each on its own.

Importers come first here too: a block that the owner drops stays in limbo until every rank that
opened it has released it. `OwnTable` has the holders.
"""

from __future__ import annotations

import logging
import os
import weakref
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from mpishare.coordination.mpi_agreement import never_free
from mpishare.errors import HandleError, UnsupportedError
from mpishare.memory.block_table import OwnTable
from mpishare.memory.memory import ArrayLayout
from mpishare.runtime.context import NodeObject
from mpishare.windows.arguments import agree, check_layout, count_of, owner_of
from mpishare.windows.pool_blocks import OpenBlocks, OwnBlocks
from mpishare.windows.pool_door import PoolDoor, open_door
from mpishare.windows.pool_handle import pack, unpack
from mpishare.windows.publisher import warn_if_kept
from mpishare.windows.undo import meet_in, undoing

if TYPE_CHECKING:
    from mpishare.backends import Backend
    from mpishare.memory.fd_client import FdClient
    from mpishare.memory.types import DTypeLike, Shape, Stream
    from mpishare.runtime.context import NodeContext

log = logging.getLogger("mpishare.pool")

# The open pools of this process, by the address of their door.
_pools: dict[str, weakref.ref[Pool]] = {}


def _forget() -> None:
    """In a fork: the connections are the parent's, and end with it."""
    for found in _pools.values():
        if (pool := found()) is not None and pool._door is None:
            pool._end.close()
    _pools.clear()


os.register_at_fork(after_in_child=_forget)


class Pool(NodeObject):
    """Memory that one rank allocates array by array, and that the others open by a handle.

    Made by `Node.pool`. All methods but `close` are local, and wait for no other rank.

    Attributes
    ----------
    name : str
        ``pool 1``: the number is the same on every rank, and never used again.
    owner : int
        The rank that allocates, in ``node.comm``.
    """

    _kind = "pool"

    def __init__(self, context: NodeContext, owner: Any, max_nbytes: Any) -> None:
        call = "Node.pool"

        def check() -> tuple[dict[str, int], None]:
            nbytes = 0 if max_nbytes is None else count_of(call, "max_nbytes", max_nbytes)
            return {"owner": owner_of(context, call, owner), "max_nbytes": nbytes}, None

        own, nbytes = agree(context, call, check)[0].values()
        is_owner = context.rank == own
        backend = context.backend
        stream = backend.enter(None)[0]

        with undoing(context, call) as undo, ExitStack() as tried:

            def create() -> tuple[tuple[OwnBlocks, PoolDoor, bytes] | None, list[str]]:
                if not is_owner:
                    return None, []
                memory = backend.create_pool(nbytes)
                undo.callback(memory.close)
                table = OwnTable(context.memory_barrier)
                undo.callback(table.close)
                # The proof that a handle is of this pool: its door gives the key to processes of
                # this user alone.
                key = os.urandom(32)
                blocks = OwnBlocks(backend, memory, table)
                door = PoolDoor(context.fd_server, key, backend, blocks, context.size)
                undo.callback(door.close)
                block = memory.allocate(1, stream)  # for the other ranks to try
                tried.callback(memory.free, [(block, 1, stream)])
                return (blocks, door, key), [memory.publish(block).hex(), door.address]

            def open_it() -> tuple[tuple[OwnBlocks | OpenBlocks, PoolDoor | FdClient, bytes], None]:
                if made is not None:
                    return made, None
                name, timeout_s = f"the pool of rank {own}", context.agreement.timeout_s
                barrier = context.memory_barrier
                lease, key, blocks = open_door(
                    address, name, timeout_s, lambda *_: backend, barrier, is_outside=False
                )
                undo.callback(lease.close)
                undo.callback(blocks.close)
                blocks.memory.let_go(blocks.memory.open(bytes.fromhex(token), 1))
                return (blocks, lease, key), None

            step = context.agreement.step_keeping
            made, replies = step(call, create)
            meet_in(undo, context, call)
            token, address = replies[own]
            (blocks, end, key), _ = step(call, open_it)
        self.name = f"pool {context.next_number('pool')}"
        self.owner: int = own
        self._context = context
        self._key = key
        self._address: str = address
        self._blocks = blocks
        self._end = end  # of the connection of this rank; on the owner its door, of all of them
        self._door = end if isinstance(end, PoolDoor) else None
        self._is_unmapped = False
        context.register(self)
        _pools[address] = weakref.ref(self)
        log.info("%s made, of rank %d", self.name, own)

    # --- the owner

    def allocate(self, shape: Shape, dtype: DTypeLike = float, stream: Stream | None = None) -> Any:
        """Allocate an array. Owner only.

        Local; stream-ordered: the array may be used on `stream` at once, on other streams after it.
        It is given back by dropping it and every view of it, and reused once no other rank holds it
        and the work enqueued on `stream` until then is done. Work on another stream must be ordered
        before that by the program, as with CuPy's own memory.

        Parameters
        ----------
        shape : int or tuple of int
            0 is allowed.
        dtype : dtype
            As in `Node.allocate`.
        stream : stream, optional
            Default: CuPy's current stream. One given as a number must outlive the pool. Ignored on
            the host backend.

        Returns
        -------
        cupy.ndarray or numpy.ndarray
            Its elements are not set.

        Raises
        ------
        CudaError, UnsupportedError
            If there is not that much memory left, on the GPU or on the host backend.
        UnsupportedError
            In a stream capture.
        ValueError
            On a rank that is not the owner.
        """
        call = f"{self.name}: allocate"
        return self._allocate(call, self._owned(call), shape, dtype, stream)

    def _allocate(self, call: str, own: OwnBlocks, shape: Shape, dtype: Any, stream: Any) -> Any:
        layout = check_layout(self._context, call, shape, dtype)
        number, keeper = enter(self._context.backend, call, stream)
        try:
            return own.allocate(layout, number, keeper)
        except UnsupportedError as error:
            raise UnsupportedError(f"{call} failed: {error}") from None

    def malloc(self, nbytes: int) -> Any:
        """Allocate bytes on CuPy's current stream, as CuPy's allocators do. Owner only.

        Local; stream-ordered; in any thread. For ``cupy.cuda.set_allocator(pool.malloc)`` and
        ``cupy.cuda.using_allocator(pool.malloc)``: then each array that CuPy makes, temporaries
        too, is one of the pool, which `handle` takes, and is given back as one of `allocate`. Set
        CuPy's allocator back before the pool is closed.

        Parameters
        ----------
        nbytes : int, bytes
            0 is allowed.

        Returns
        -------
        cupy.cuda.MemoryPointer

        Raises
        ------
        UnsupportedError
            On the host backend, since NumPy lets only its C API set an allocator; in a stream
            capture.
        """
        call = f"{self.name}: malloc"
        own = self._owned(call, in_any_thread=True)
        if not self._context.backend.has_streams:
            raise UnsupportedError(
                f"{call} failed: it is for CuPy. NumPy takes its memory from elsewhere only by its "
                "C API (NEP 49), which mpishare does not use. Make arrays by pool.allocate, and "
                "let NumPy write into them: out=..."
            )
        return self._allocate(call, own, (nbytes,), "u1", None).data

    def handle(self, array: Any) -> bytes:
        """Return a handle of an array of this pool. Owner only.

        For `open` on other ranks, and for `mpishare.open_handle` in any process of this user on
        this machine. Local; does not block. Send it when the array is written, after
        `Node.synchronize` or another ordering of the ranks, and keep the array until the others
        have opened it.

        Parameters
        ----------
        array : array
            Of `allocate`, or made by CuPy with `malloc` as its allocator; or a view of one.

        Returns
        -------
        bytes
            About 100 to 250 bytes, more of many axes, which can be pickled, stored, and sent by any
            means.

        Raises
        ------
        ValueError
            If the array is not of this pool, or on a rank that is not the owner.
        """
        call = f"{self.name}: handle"
        own = self._owned(call)
        found = own.find(array)
        if found is None:
            raise ValueError(
                f"{call} failed: this is not an array of the pool. Give one that allocate "
                "returned, or a view of it."
            )
        block, offset = found
        offset = offset if array.size else 0  # NumPy's own may lie beyond
        layout = ArrayLayout(array.shape, array.dtype, array.strides, offset)
        if not layout.is_inside(block.nbytes):
            raise ValueError(
                f"{call} failed: the view reaches beyond the array that it is made of."
            )
        return pack(self._key, self._address, block, own.publish(block), layout)

    # --- the other ranks

    def open(self, handle: bytes, stream: Stream | None = None) -> Any:
        """Return an array of the owner: the same bytes, no copy. On every other rank.

        Local; does not block: about a microsecond in the driver, some more in Python. The owner
        reuses the memory after this array and every view of it is dropped here, and the work that
        was enqueued on `stream` until then is done; on CUDA that is noticed by the next `open`.
        Work on another stream must be ordered before that by the program.

        Parameters
        ----------
        handle : bytes
            Of `handle`, on the owner.
        stream : stream, optional
            On which the array is used. Default: CuPy's current stream. One given as a number must
            outlive the pool. Ignored on the host backend.

        Returns
        -------
        cupy.ndarray or numpy.ndarray
            On this rank's own device.

        Raises
        ------
        HandleError
            If the owner has dropped the array, or if the handle is of another pool or damaged.
        CudaError
            If the GPU cannot map it.
        UnsupportedError
            In a stream capture.
        ValueError
            On the owner, which has the array.
        PeerTimeout, PeerError
            If the node is broken.
        """
        call = f"{self.name}: open"
        self._check(call)
        blocks = self._blocks
        if isinstance(blocks, OwnBlocks):
            raise ValueError(  # noqa: TRY004  the rank is the wrong value
                f"{call} failed: rank {self.owner} is the owner, and has the array already"
            )
        number, keeper = enter(self._context.backend, call, stream)
        try:
            block, layout = unpack(self._key, handle)
            return blocks.open(block, layout, number, keeper)
        except HandleError as error:
            raise HandleError(f"{call} failed: {error}") from None

    # --- closing

    def close(self) -> None:
        """Unmap the pool on all ranks, then free it.

        Collective, host-blocking: waits for this process's streams and for the other ranks. Closing
        twice has no effect. Arrays that are still held stay valid, and a `ResourceWarning` names
        the pool, unless the node closes it: then the memory is kept until the node is closed, on
        the host backend until the last of them is gone.
        """
        if self._is_closed:
            return
        context = self._context
        context.agreement.check()
        with context.agreement.collective():
            context.begin_close(f"{self.name}: close")
            self._is_closed = True
            _pools.pop(self._address, None)
            is_held = self._blocks.is_held
            is_gone = self._release()
        context.unregister(self)
        log.debug("%s closed%s", self.name, "" if is_gone else ": its memory is held")
        if not is_gone:
            context.retained.append(self._release)
        openers = [] if is_gone or self._door is None else self._door.openers
        warn_if_kept(context, self.name, openers, is_held=is_held, stacklevel=2)

    def _release(self) -> bool:
        """Unmap and free memory without arrays; return whether all is free on all ranks.

        Collective, host-blocking. Part of `close`, and once more when the node is closed.
        """
        context, call, blocks = self._context, f"{self.name}: close", self._blocks

        def unmap() -> bool:
            blocks.finish()
            # On the host the memory goes with the last array: waiting for that would keep it.
            return (blocks.is_empty or not context.backend.has_streams) and self._unmap()

        def release() -> bool:
            if self._door is not None:
                return self._door.end()
            context.drain(call)
            return unmap()

        def free(released: list[bool]) -> bool:
            # Not while a rank still maps a block.
            return all(released) and (self._door is None or unmap())

        return all(context.close_in_order(call, release, free))

    def _unmap(self) -> bool:
        if not self._is_unmapped:
            self._is_unmapped = True
            self._end.close()
            self._blocks.close()
        return True

    def _let_go(self) -> bool:
        return not self._blocks.is_held

    def _abandon(self) -> None:
        self._is_closed = True
        _pools.pop(self._address, None)
        if self._door is not None:
            self._door.close()
        never_free(self._end)  # arrays are held as long as it is open
        self._context.unregister(self)

    def __repr__(self) -> str:
        return f"<mpishare.{self.name.capitalize()}: owner={self.owner}{self._state()}>"

    def _check(self, call: str, *, in_any_thread: bool = False) -> None:
        agreement = self._context.agreement
        if self._is_closed:
            raise self._closed(call)
        if in_any_thread:
            agreement.check_whole()
        else:
            agreement.check()

    def _owned(self, call: str, *, in_any_thread: bool = False) -> OwnBlocks:
        self._check(call, in_any_thread=in_any_thread)
        if isinstance(self._blocks, OpenBlocks):
            raise ValueError(  # noqa: TRY004
                f"{call} failed: rank {self.owner} is the owner, not rank {self._context.rank}. "
                "The owner allocates and makes handles; the others open them."
            )
        return self._blocks


def enter(backend: Backend, call: str, stream: Any) -> tuple[int, Any]:
    """Return the stream of a call, and what keeps it alive; it must not be under capture."""
    number, keeper, _, is_capturing = backend.enter(stream)
    if is_capturing:
        raise UnsupportedError(
            f"{call} failed: the stream is being captured. Call it before the capture."
        )
    return number, keeper


def pool_here(address: str) -> Pool | None:
    """Return the open pool of this address, if this process is a rank of its node.

    Raises `HandleError` if it is, and has dropped the pool: it may not map its own memory anew.
    """
    found = _pools.get(address)
    if found is None:
        return None
    pool = found()
    if pool is None:
        raise HandleError("this process is a rank of the pool's node, and has dropped the pool")
    return pool

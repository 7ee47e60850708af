"""The blocks of a pool, on its owner and on other ranks.

Importers come first: a block that the owner drops stays in limbo until every rank that opened it
has released it, and a rank releases it when its arrays are dropped and its streams are past them.

An array is dropped wherever its last reference goes: in another thread, or by the garbage collector
in the midst of any call. The code that runs then makes no CUDA call, waits for no lock, and changes
no state that a call may be changing.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpishare.errors import EpochError, HandleError, MpiShareError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mpishare.backends import Backend, OwnMemory, PeerMemory, PoolMemory
    from mpishare.memory.block_table import OpenedTable, OwnTable
    from mpishare.memory.memory import ArrayLayout

# Dropped blocks that one `allocate` checks: all of them in turn, and no call for long.
_LOOKS = 4


class _Watch(weakref.ref[Any]):
    """Reports the block whose arrays are gone."""

    __slots__ = ("of",)
    of: Block


@dataclass(eq=False)
class Block:
    address: int  # in this process
    nbytes: int
    slot: int  # with `generation`, its place in the table of blocks
    generation: int
    token: bytes | None = None  # for `PeerMemory.open`, once there is a handle of it
    stream: int = 0
    keeper: Any = None  # keeps the stream alive
    watch: _Watch | None = None

    @property
    def is_held(self) -> bool:
        """Whether arrays on it are alive here."""
        return self.watch is not None and self.watch() is not None


def _watched(
    memory: PoolMemory, block: Block, layout: ArrayLayout, drop: Callable[[_Watch], None]
) -> Any:
    """Return an array on a block; `drop` is called once that and all views of it are gone."""
    array, anchor = memory.array(block.address, block.nbytes, layout)
    block.watch = _Watch(anchor, drop)
    block.watch.of = block
    return array


class OwnBlocks:
    """The blocks of a pool on its owner."""

    def __init__(self, backend: Backend, memory: OwnMemory, table: OwnTable) -> None:
        self._backend = backend
        self.memory = memory
        self.table = table
        self._blocks: dict[int, Block] = {}
        self._dropped: deque[Block] = deque()
        # Reentrant: CuPy may allocate in the midst of a call, in a finalizer.
        self._lock = threading.RLock()

    @property
    def is_empty(self) -> bool:
        """Whether every block was given back."""
        return not self._blocks

    @property
    def is_held(self) -> bool:
        """Whether arrays are alive here."""
        return any(block.is_held for block in self._blocks.values())

    def allocate(self, layout: ArrayLayout, stream: int, keeper: Any) -> Any:
        """Return an array on a new block, after freeing some of the dropped ones."""
        nbytes = layout.nbytes
        with self._lock:
            self.give_back(_LOOKS)
            try:
                address = self.memory.allocate(nbytes, stream)
            except MpiShareError:
                if not self.give_back():
                    raise
                address = self.memory.allocate(nbytes, stream)
            try:
                slot, generation = self.table.begin()
            except BaseException:
                self.memory.free([(address, nbytes, stream)])
                raise
            block = Block(address, nbytes, slot, generation, stream=stream, keeper=keeper)
            self._blocks[address] = block
            return _watched(self.memory, block, layout, self._drop)

    def find(self, array: Any) -> tuple[Block, int] | None:
        """Return the block of an array, and the array's offset in it; None if it is in none."""
        found = self.memory.find(array)
        if found is None or found[0] not in self._blocks:
            return None
        return self._blocks[found[0]], found[1]

    def publish(self, block: Block) -> bytes:
        """Return the name of a block for `OpenBlocks.open`."""
        with self._lock:
            if block.token is None:
                block.token = self.memory.publish(block.address)
            return block.token

    def give_back(self, looks: int | None = None) -> bool:
        """Free unused ones among `looks` dropped blocks, default all; return whether there are."""
        dropped, unused = self._dropped, list[Block]()
        count = len(dropped) if looks is None else min(looks, len(dropped))
        self.table.fence()  # their generations have ended before it
        for _ in range(count):
            block = dropped.popleft()
            (dropped if self._is_used(block) else unused).append(block)
        if unused:
            self.memory.free([(block.address, block.nbytes, block.stream) for block in unused])
        for block in unused:
            del self._blocks[block.address]
            self.table.give_back(block.slot)
        return bool(unused)

    def finish(self) -> None:
        """Free the blocks that are no longer used."""
        self.give_back()

    def _is_used(self, block: Block) -> bool:
        if self._backend.is_capturing(block.stream):
            return True  # a free would become a part of the graph
        if block.token is None:
            return False
        return self.table.is_held(block.slot)

    def close(self) -> None:
        """Free the memory, once every block was given back."""
        self.memory.close()
        self.table.close()

    def _drop(self, watch: _Watch) -> None:
        if self.table.is_writable:
            self.table.end(watch.of.slot, watch.of.generation)
            self._dropped.append(watch.of)


class OpenBlocks:
    """The blocks of a pool that another process than its owner opened, each as often as it did."""

    def __init__(self, backend: Backend, memory: PeerMemory, table: OpenedTable) -> None:
        self._backend = backend
        self.memory = memory
        self._table = table
        self._dropped: deque[Block] = deque()
        self._held: dict[int, set[Block]] = {}  # by slot, which this process holds
        self._unrecorded: list[Block] = []
        self._recorded: list[tuple[Any, list[Block]]] = []
        self._events: list[Any] = []
        # Reentrant: a handler of a signal may come in the midst of a call, and is refused.
        self._lock = threading.RLock()
        self._is_in_call = False

    @property
    def is_empty(self) -> bool:
        """Whether this rank has released all blocks."""
        return not self._held

    @property
    def is_held(self) -> bool:
        """Whether arrays are alive here."""
        with self._in_call():
            return any(block.is_held for held in self._held.values() for block in held)

    def open(self, block: Block, layout: ArrayLayout, stream: int, keeper: Any) -> Any:
        """Return an array on a block of the owner; `HandleError` if that has dropped it.

        `block` is as a handle describes it, and becomes the record of this opening.
        """
        block.stream, block.keeper = stream, keeper
        try:
            with self._in_call():
                self._release_dropped()
                self._open(block)
                return _watched(self.memory, block, layout, self._drop)
        finally:
            self.settle()  # blocks that were dropped meanwhile

    def settle(self) -> None:
        """Release blocks that were dropped here and are no longer used by any stream."""
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                if self._is_in_call:
                    return  # that call settles them
                with self._in_call():
                    self._release_dropped()
            finally:
                self._lock.release()

    @contextmanager
    def _in_call(self) -> Iterator[None]:
        """Keep other threads out; refuse a call amid another one of this thread."""
        with self._lock:
            if self._is_in_call:
                raise EpochError(
                    "a handler of a signal came amid a call of the same pool. Call it after that."
                )
            self._is_in_call = True
            try:
                yield
            finally:
                self._is_in_call = False

    def close(self) -> None:
        """Unmap the memory, once this process has released all blocks."""
        self.memory.close()
        self._table.close()

    def finish(self) -> None:
        """Release the rest, once all streams are done; destroy the events."""
        with self._in_call():
            self._release_dropped()
            if not self._recorded:
                self._backend.close_events(self._events)
                self._events.clear()

    def _open(self, block: Block) -> None:
        slot, generation = block.slot, block.generation
        held = self._held.get(slot, set())
        if held:
            is_same = next(iter(held)).generation == generation
            is_alive = is_same and self._table.is_alive(slot, generation)
        else:
            is_alive = self._table.hold(slot, generation)
        if block.token is None or not is_alive:
            raise HandleError(
                "its array was dropped by the owner. Open a handle while the owner keeps its "
                "array, as until a node.barrier() that comes after."
            )
        try:
            block.address = self.memory.open(block.token, block.nbytes)
        except BaseException:
            if not held:
                self._table.release_slot(slot)
            raise
        held.add(block)
        self._held[slot] = held

    def _drop(self, watch: _Watch) -> None:
        if self._table.is_writable:
            self._dropped.append(watch.of)
            if not self._backend.has_streams:
                self.settle()

    def _release_dropped(self) -> None:
        while self._dropped:
            self._unrecorded.append(self._dropped.popleft())
        if self._unrecorded:
            self._record()
        if self._recorded:
            self._recorded = [each for each in self._recorded if not self._is_over(*each)]

    def _record(self) -> None:
        """Record an event on each stream behind the work that uses dropped blocks."""
        backend, by_stream = self._backend, dict[int, list[Block]]()
        for block in self._unrecorded:
            by_stream.setdefault(block.stream, []).append(block)
        self._unrecorded = []
        for stream, blocks in by_stream.items():
            if backend.is_capturing(stream):
                self._unrecorded.extend(blocks)  # the event would become a part of the graph
            else:
                event = self._events.pop() if self._events else backend.local_event()
                backend.record(event, stream)
                self._recorded.append((event, blocks))

    def _is_over(self, event: Any, blocks: list[Block]) -> bool:
        if not self._backend.is_event_done(event):
            return False
        while blocks:
            block = blocks.pop()
            self.memory.let_go(block.address)
            held = self._held[block.slot]
            held.discard(block)
            if not held:
                del self._held[block.slot]
                self._table.release_slot(block.slot)
        self._events.append(event)
        return True

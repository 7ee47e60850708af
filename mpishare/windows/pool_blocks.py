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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from mpishare.errors import HandleError, MpiShareError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.backends import Backend, OwnMemory, PeerMemory
    from mpishare.memory.block_table import BlockTable
    from mpishare.memory.memory import ArrayLayout

# Blocks in limbo that one `allocate` checks: all of them in turn, and no call for long.
_LOOKS = 4


class _Watch(weakref.ref[Any]):
    """Reports the block whose arrays are gone."""

    __slots__ = ("of",)
    of: Any


@dataclass(eq=False)
class Block:
    address: int
    nbytes: int
    slot: int  # with `generation`, its place in the `BlockTable`
    generation: int
    token: bytes | None = None  # for `PoolMemory.open`, once there is a handle of it
    stream: int = 0
    keeper: Any = None  # keeps the stream alive
    watch: _Watch | None = None


class OwnBlocks:
    """The blocks of a pool on its owner; those of a rank that `is_dead` count as released."""

    def __init__(
        self,
        backend: Backend,
        memory: OwnMemory,
        table: BlockTable,
        is_dead: Callable[[int], bool],
    ) -> None:
        self._backend = backend
        self.memory = memory
        self.table = table
        self._is_dead = is_dead
        # By slot, the number of processes outside the node that hold its block; see `PoolDoor`.
        self.held_outside: dict[int, int] = {}
        self._blocks: dict[int, Block] = {}
        self._dropped: deque[Block] = deque()
        self._limbo: deque[Block] = deque()
        # Reentrant: CuPy may allocate in the midst of a call, in a finalizer.
        self._lock = threading.RLock()

    @property
    def is_empty(self) -> bool:
        """Whether every block was given back."""
        return not self._blocks

    @property
    def is_held(self) -> bool:
        """Whether arrays are alive here."""
        return len(self._blocks) > len(self._dropped) + len(self._limbo)

    def allocate(self, layout: ArrayLayout, stream: int, keeper: Any) -> Any:
        """Return an array on a new block, after freeing some of those in limbo."""
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
            array, anchor = self.memory.array(address, nbytes, layout)
            block.watch = _Watch(anchor, self._drop)
            block.watch.of = block
            return array

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
        """Free unused blocks among `looks` in limbo, default all; return whether any was freed."""
        limbo, unused = self._limbo, list[Block]()
        while self._dropped:
            limbo.append(self._dropped.popleft())
        self.table.fence()  # all of them have ended before it
        for _ in range(len(limbo) if looks is None else min(looks, len(limbo))):
            block = limbo.popleft()
            (limbo if self._is_used(block) else unused).append(block)
        if unused:
            self.memory.free([(block.address, block.nbytes, block.stream) for block in unused])
        for block in unused:
            del self._blocks[block.address]
            self.table.give_back(block.slot)
        return bool(unused)

    def finish(self) -> None:
        """Free the blocks that are no longer used."""
        self.give_back()

    def close(self) -> None:
        """Free the memory, once every block was given back."""
        self.memory.close()
        self.table.close()

    def _is_used(self, block: Block) -> bool:
        if self._backend.is_capturing(block.stream):
            return True  # a free would become a part of the graph
        if block.token is None:
            return False
        if block.slot in self.held_outside:
            return True
        return any(not self._is_dead(rank) for rank in self.table.holders(block.slot))

    def _drop(self, watch: _Watch) -> None:
        if not self.table.is_writable:
            return
        block: Block = watch.of
        self.table.end(block.slot, block.generation)
        self._dropped.append(block)


@dataclass(eq=False)
class _Opening:
    address: int
    slot: int
    stream: int
    keeper: Any
    watch: _Watch | None = None


@dataclass
class _Held:
    """The openings of this rank in a slot; it keeps them, and so their watches, alive."""

    generation: int
    openings: set[_Opening] = field(default_factory=set)


class Holder(Protocol):
    """Holds blocks for this process: a rank's `BlockTable`, or a `Lease` outside the node."""

    @property
    def is_writable(self) -> bool: ...
    def hold(self, slot: int, generation: int) -> bool: ...
    def is_alive(self, slot: int, generation: int) -> bool: ...
    def let_go(self, slot: int) -> None: ...
    def close(self) -> None: ...


class OpenBlocks:
    """The blocks of a pool that a process which is not its owner opened."""

    def __init__(self, backend: Backend, memory: PeerMemory, table: Holder) -> None:
        self._backend = backend
        self._memory = memory
        self._table = table
        self._held: dict[int, _Held] = {}
        self._dropped: deque[_Opening] = deque()
        self._unrecorded: list[_Opening] = []
        self._recorded: list[tuple[Any, list[_Opening]]] = []
        self._events: list[Any] = []
        self._lock = threading.Lock()

    @property
    def is_empty(self) -> bool:
        """Whether this rank has released all blocks."""
        return not self._held

    @property
    def is_held(self) -> bool:
        """Whether arrays are alive here."""
        count = sum(len(held.openings) for held in self._held.values())
        recorded = sum(len(openings) for _, openings in self._recorded)
        return count > len(self._dropped) + len(self._unrecorded) + recorded

    def open(self, block: Block, layout: ArrayLayout, stream: int, keeper: Any) -> Any:
        """Return an array on a block of the owner; `HandleError` if that has dropped it."""
        try:
            with self._lock:
                self._let_go()
                return self._open(block, layout, stream, keeper)
        finally:
            self.settle()  # blocks that were dropped meanwhile

    def settle(self) -> None:
        """Release blocks that were dropped here and are no longer used by any stream."""
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                self._let_go()
            finally:
                self._lock.release()

    def close(self) -> None:
        """Unmap the memory, once this rank has released all blocks."""
        self._memory.close()
        self._table.close()

    def finish(self) -> None:
        """Release the rest, once all streams are done; destroy the events."""
        with self._lock:
            self._let_go()
            if not self._recorded:
                self._backend.close_events(self._events)
                self._events.clear()

    def _open(self, block: Block, layout: ArrayLayout, stream: int, keeper: Any) -> Any:
        slot, token = block.slot, block.token
        held = self._held.get(slot)
        is_new = held is None
        if held is None:
            held = _Held(block.generation)
            is_alive = self._table.hold(slot, block.generation)
        else:
            is_same = held.generation == block.generation
            is_alive = is_same and self._table.is_alive(slot, block.generation)
        if token is None or not is_alive:
            raise HandleError(
                "its array was dropped by the owner. Open a handle while the owner keeps its "
                "array, as until a node.barrier() that comes after."
            )
        try:
            opening = _Opening(self._memory.open(token, block.nbytes), slot, stream, keeper)
        except BaseException:
            if is_new:
                self._table.let_go(slot)
            raise
        self._held[slot] = held
        held.openings.add(opening)
        array, anchor = self._memory.array(opening.address, block.nbytes, layout)
        opening.watch = _Watch(anchor, self._drop)
        opening.watch.of = opening
        return array

    def _drop(self, watch: _Watch) -> None:
        if not self._table.is_writable:
            return
        self._dropped.append(watch.of)
        if not self._backend.has_streams:
            self.settle()

    def _let_go(self) -> None:
        while self._dropped:
            self._unrecorded.append(self._dropped.popleft())
        if self._unrecorded:
            self._record()
        if self._recorded:
            self._recorded = [each for each in self._recorded if not self._is_over(*each)]

    def _record(self) -> None:
        """Record an event on each stream behind the work that uses dropped blocks."""
        backend, by_stream = self._backend, dict[int, list[_Opening]]()
        for opening in self._unrecorded:
            by_stream.setdefault(opening.stream, []).append(opening)
        self._unrecorded = []
        for stream, openings in by_stream.items():
            if backend.is_capturing(stream):
                self._unrecorded.extend(openings)  # the event would become a part of the graph
            else:
                event = self._events.pop() if self._events else backend.local_event()
                backend.record(event, stream)
                self._recorded.append((event, openings))

    def _is_over(self, event: Any, openings: list[_Opening]) -> bool:
        if not self._backend.is_event_done(event):
            return False
        while openings:
            opening = openings.pop()
            self._memory.let_go(opening.address)
            held = self._held[opening.slot]
            held.openings.discard(opening)
            if not held.openings:
                del self._held[opening.slot]
                self._table.let_go(opening.slot)
        self._events.append(event)
        return True

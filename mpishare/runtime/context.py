"""The node context: agreement, backend and counters for the objects of a node, and their list."""

from __future__ import annotations

import operator
import time
import warnings
from collections import Counter
from contextlib import ExitStack, suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from mpishare import native
from mpishare.backends.suballocator import Suballocator
from mpishare.coordination.control_block import Mark
from mpishare.coordination.counters import SLOT_WORDS, Counters, whole_slots
from mpishare.coordination.life import Event
from mpishare.coordination.mpi_agreement import never_free
from mpishare.coordination.objects import Children, Dropped, NodeObject
from mpishare.coordination.poll import RADIX, Fence, poll, rounds
from mpishare.coordination.recording import require_none
from mpishare.errors import CudaError
from mpishare.memory.arguments import is_int
from mpishare.memory.fd_server import FdServer
from mpishare.memory.handle import Handle
from mpishare.memory.kinds import Kind
from mpishare.memory.shared import map_on_all_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi4py import MPI

    from mpishare.backends import Backend, InPlace
    from mpishare.coordination.agreement import Agreement
    from mpishare.coordination.counters import CounterPool
    from mpishare.coordination.watchdog import Watchdog
    from mpishare.errors import MpiShareError
    from mpishare.memory.memory import Memory
    from mpishare.memory.shared import SharedMemory, Steps
    from mpishare.runtime.report import Member, Report

__all__ = ["Location", "NodeContext", "NodeObject"]

_FINISH_S = 5.0
_BROKEN = Mark.BROKEN  # here, since a member of an enum takes longer to look up
_CHUNK_WORDS = 1 << 16
_SPINS = 16
# Most ranks for which a fence on streams waits in one round; above, in log2(ranks) rounds, since
# each wait is an operation of the stream.
_FLAT_RANKS = 16
_MANY = 64  # closed windows whose memory arrays hold


class Location(NamedTuple):
    """Position of memory in a window: the window's number, the segment's rank, the byte offset."""

    window: int
    rank: int
    offset: int


class NodeContext:
    """Agreement, backend and counters of a node, for its objects.

    `nonces`, `pids` and `uuids` have for each rank of the node the unique name of its process, the
    process id in its PID namespace, and its GPU, which is empty on the host backend. `ncpus` is the
    number of processors for all its ranks together.
    """

    # As it was when the node was made, or when the user last asked for it.
    report: Report
    # The node's communicator, which belongs to the user, and the duplicate of the given one.
    comms: tuple[MPI.Intracomm, ...]

    def __init__(
        self,
        agreement: Agreement,
        backend: Backend,
        watchdog: Watchdog,
        members: Sequence[Member],
        nonces: list[str],
        ncpus: int,
    ) -> None:
        self.agreement, self.life = agreement, agreement.life
        self.rank, self.size = agreement.rank, agreement.size
        self.backend = backend
        self.nonces = nonces
        self.name = nonces[0]  # unique, and known to its ranks alone
        self.uuids = [member.device.uuid if member.device else "" for member in members]
        # Those, then the GPUs of other nodes: containers of a machine may share one.
        self.all_uuids = self.uuids
        self.watchdog = watchdog
        # A full barrier of this processor, where it needs one; see `mpishare.native`.
        self.memory_barrier = agreement.block.sync
        # Checks of a counter before the core is yielded: with more ranks than cores, the awaited
        # rank may need this very core.
        self.spins_per_yield = _SPINS if agreement.size <= ncpus else 1
        # The same for the checks of compiled code, which are shorter.
        self.looks_per_yield = 32 if self.spins_per_yield > 1 else 1
        # The extension module of `mpishare.native`: exchanges and waits in C.
        self.compiled: Any = None
        # Why some rank has none where it is needed, on hosts.
        self.native_missing: str | None = None
        # Finds races of accesses to windows, where `MPISHARE_CHECK` asks for it.
        self.checker: Any = None
        # Makes a `Publication`; see `windows/publisher.py`.
        self.publish: Any = None
        # Incremented whenever a window opens or closes.
        self.windows_version = 0
        # Why messages of plans cannot go out of GPU memory; empty: they can; None: none go.
        self.gpu_messages: str | None = None
        # For each closed window whose memory is held by arrays: tries to release it. Collective.
        self.retained: list[Callable[[], bool]] = []
        self._many = _MANY
        # Texts of warnings while the node closes its objects, for its end; see `warn`.
        self.to_warn: list[str] | None = None
        # The objects of all ranks of the node.
        self.dropped = Dropped()
        self._children = Children()
        watchdog.objects = self._children.registered
        # The communicators of NCCL, by the ranks that have one, on other nodes too.
        self.nccl: dict[Any, Any] = {}
        self._segments: dict[int, Sequence[Memory | None]] = {}
        self._chunks: list[SharedMemory] = []
        # Memory of small windows on hosts; see `windows/small.py`.
        self.small_blocks: Any = None
        # The number of the newest object of each kind on this rank.
        self.numbers = Counter[str]()

    @cached_property
    def suballocator(self) -> Suballocator:
        """Memory of GPUs in small blocks."""
        return Suballocator(self.backend)

    @cached_property
    def fd_server(self) -> FdServer:
        """Lends files to the other ranks, and answers processes outside the job."""
        return FdServer()

    @cached_property
    def in_place(self) -> InPlace:
        """How memory that exists already is shared."""
        return self.backend.in_place(self.fd_server, self.agreement.timeout_s)

    @property
    def compiled_here(self) -> Any:
        """The extension module for what ranks do alike in C and in Python, or None.

        On CUDA, where C serves the host alone, each rank may choose by itself.
        """
        return native.load()[0] if self.backend.has_streams else self.compiled

    def fence(
        self, words: memoryview[int], rounds: Sequence[tuple[int, Sequence[int]]]
    ) -> Callable[[int], int]:
        """Return `Fence.meet` for rounds of slots, each one to write and those to wait for."""
        module = self.compiled_here
        if module is not None:
            made = module.Fence(words, rounds, self.looks_per_yield)
        else:
            made = Fence(words, rounds, self.spins_per_yield, self.memory_barrier)
        meet: Callable[[int], int] = made.meet
        return meet

    @cached_property
    def fence_rounds(self) -> tuple[list[tuple[int, dict[int, int]]], list[tuple[int, int]]]:
        """What this rank does in each round of a fence, alike for all windows.

        That is the slot to write, and the slots to wait for with their ranks; behind it all waits.
        """
        # On streams a wait costs the host as much as a write.
        on_streams = 2 if self.size > _FLAT_RANKS else self.size
        radix = on_streams if self.backend.has_streams else RADIX
        found = [
            (SLOT_WORDS * self.rank + number, {SLOT_WORDS * r + number: r for r in awaited})
            for number, awaited in enumerate(rounds(self.rank, self.size, radix))
        ]
        return found, [wait for _, waits in found for wait in waits.items()]

    def rank_of(self, call: str, value: Any) -> int:
        """Return a rank that the user gave, or raise `TypeError` or `ValueError`."""
        if not is_int(value):
            raise TypeError(f"{call} failed: {value!r} is not a rank of the node")
        rank = operator.index(value)
        if not 0 <= rank < self.size:
            raise ValueError(
                f"{call} failed: {value!r} is not a rank of the node (0 to {self.size - 1})"
            )
        return rank

    def warn(self, text: str, stacklevel: int) -> None:
        """Warn of something that is closed: after the node has closed all, where the node does.

        A filter may make the warning an error, and no other rank may wait for this one then.
        """
        if self.to_warn is None:
            warnings.warn(text, ResourceWarning, stacklevel=stacklevel + 1)
        else:
            self.to_warn.append(text)

    def next_number(self, kind: str) -> int:
        """Return the number of a new object of its kind, from 1, the same on every rank."""
        self.numbers[kind] += 1
        return self.numbers[kind]

    # --- the objects of the node

    def register(
        self, child: NodeObject, dropped: Dropped | None = None, *, is_part: bool = False
    ) -> None:
        """Add a complete object: from now on it is watched, and closed with the node.

        `dropped` is by default that of all ranks of the node. An object that `is_part` of another
        one is closed by that.
        """
        is_unnumbered = is_part or child._is_local
        self._children.add(child, None if is_unnumbered else dropped or self.dropped)
        if child._memories:
            self._segments[child._number] = child._memories
            self.windows_version += 1
        if self.checker is not None and not is_unnumbered:
            self.checker.watch(child)

    def unregister(self, child: NodeObject) -> None:
        """Remove an object, before any memory that the watchdog reads is unmapped."""
        if child._children is None:
            return
        with self.watchdog.removing():
            self._children.remove(child)
        if child._memories:
            del self._segments[child._number]
            self.windows_version += 1
            if self.checker is not None:
                self.checker.unwatch(child)

    @property
    def children(self) -> list[NodeObject]:
        """The open objects in the order in which they must be closed: plans first, newest first."""
        newest_first = self._children.registered()[::-1]
        return sorted(newest_first, key=lambda child: not child._closes_first)

    def begin(self, call: str, work: Callable[[], Any]) -> list[Any]:
        """Do the first step of a collective call, then close objects that all ranks have dropped.

        Collective, host-blocking; as `Agreement.step`.
        """
        ids = self.dropped_ids(self.dropped)
        replies = self.agreement.step(call, lambda: [ids, work()])
        self.dropped.close([each[0] for each in replies], self.rank)
        return [each[1] for each in replies]

    def dropped_ids(self, dropped: Dropped) -> list[int]:
        """Return the numbers of dropped objects that this rank has to publish."""
        self.agreement.check()
        self.note_dropped()
        return [] if self.backend.is_in_capture() else dropped.ids()

    def note_dropped(self) -> None:
        """Note the objects that this rank has dropped, and close those that need no other rank."""
        if self._children.has_dropped and not self.backend.is_in_capture():
            self._children.note_dropped()

    def locate(self, address: int, nbytes: int) -> Location | None:
        """Return where these bytes of this process lie in an open window; None if in none."""
        for number, memories in self._segments.items():
            for rank, memory in enumerate(memories):
                if memory is not None:
                    offset = address - memory.address
                    if offset >= 0 and offset + nbytes <= memory.nbytes:
                        return Location(number, rank, offset)
        return None

    def segment_address(self, window: int, rank: int) -> int | None:
        """Return the address of a segment on this rank; None if its window is closed."""
        memory = self.segment_memory(window, rank)
        return None if memory is None else memory.address

    def segment_memory(self, window: int, rank: int) -> Memory | None:
        """Return a segment as mapped on this rank; None if its window is closed."""
        return self._segments[window][rank] if window in self._segments else None

    # --- memory and counters

    def handle(
        self, token: str, offset: int, nbytes: int, capacity: int, kind: str = Kind.ALLOCATION
    ) -> str:
        """Return the packed handle of a part of memory that this rank allocated, or shares."""
        return Handle(
            backend=self.backend.name,
            token=token,
            offset=offset,
            nbytes=nbytes,
            capacity=capacity,
            uuid=self.uuids[self.rank],
            nonce=self.nonces[self.rank],
            kind=kind,
        ).pack()

    @property
    def counter_pool(self) -> CounterPool:
        """The counters of the node, which are released after a failure."""
        return self.agreement.block.pool

    def take_counters(self, call: str, count: int) -> Counters:
        """Return zeroed counters, the same on every rank.

        Collective, since all ranks must take them in the same order; host-blocking where the
        control block is full and another chunk of shared memory must be mapped.
        """
        count = whole_slots(count)
        if not self.counter_pool.has(count):
            step, nbytes = partial(self.agreement.step_keeping, call), 8 * max(count, _CHUNK_WORDS)
            self.extend(self.counter_pool, step, nbytes, is_maker=self.rank == 0)
        return self.counter_pool.take(count)

    def extend(self, pool: CounterPool, step: Steps, nbytes: int, *, is_maker: bool) -> None:
        """Add new memory to a pool of some ranks until the node closes, as `map_registered`."""
        memory, address = self.map_registered(step, nbytes, is_maker=is_maker)
        self.keep_mapped(memory)
        # Only now, so that the pools of all ranks stay the same.
        pool.add(memoryview(memory.buffer).cast("Q"), address)

    def map_registered(
        self, step: Steps, nbytes: int, *, is_maker: bool
    ) -> tuple[SharedMemory, int]:
        """Map the same zeroed host memory on some ranks, for their GPUs too. Collective over them.

        Returns the memory, and its address on this rank's GPU, 0 on the host backend; for
        `unmap_registered`.
        """
        memory = map_on_all_ranks(step, nbytes, is_maker=is_maker)
        memory.close_file()
        with ExitStack() as undo:
            undo.callback(memory.close)

            def register() -> tuple[int, None]:
                address = self.backend.register(memory)
                undo.callback(self.backend.unregister, memory)
                return address, None

            address, _ = step(register)
            undo.pop_all()
        return memory, address

    def unmap_registered(self, memory: SharedMemory) -> None:
        self.backend.unregister(memory)
        memory.close()

    def keep_mapped(self, memory: SharedMemory) -> None:
        """Keep memory until the node closes."""
        self._chunks.append(memory)

    def close_chunks(self) -> None:
        """Unmap the memory of pools, as the last step."""
        self.small_blocks = None  # then only arrays keep their mapping
        while self._chunks:
            self.unmap_registered(self._chunks.pop())

    # --- waits for streams

    def synchronize(self, stream: Any, call: str) -> None:
        """Wait on the host for a stream, with the deadline; see `Node.synchronize`."""
        agreement, backend = self.agreement, self.backend
        agreement.check()
        handle, owner = backend.stream(stream)
        if not backend.has_streams:
            return
        require_none(call, "what is captured runs with a replay, so that the wait would not end")
        self.wait_until(lambda: backend.is_done(handle), call)
        del owner  # keeps the stream alive until here

    def wait_until(self, is_done: Callable[[], bool], call: str) -> None:
        """Wait on the host until work on a stream is done, with the deadline."""
        agreement = self.agreement

        def look() -> None:
            agreement.check_whole()
            agreement.progress()

        with agreement.blocked(call):
            if not poll(is_done, agreement.timeout_s, look):
                raise self.stream_timeout(call)
        self.check_released()

    def drain(self, call: str) -> None:
        """Wait on the host for all streams of this process, with the deadline."""
        if not self.backend.drain(self.agreement.timeout_s):
            raise self.stream_timeout(call)
        self.check_released()

    def check_released(self) -> None:
        """Raise if a failure released the wait that has just ended: then no signal ended it."""
        agreement = self.agreement
        if self._children.kernels and agreement.life.failure is None:
            for child in self._children.registered():
                child._check_kernels()
        is_released = self.backend.has_streams and agreement.block.has_any(_BROKEN)
        if agreement.life.failure is None and is_released:
            self.watchdog.look()
        agreement.check_whole()

    def stream_timeout(self, call: str) -> MpiShareError:
        """Return the error for a stream that was not done by the deadline."""
        pending = self.watchdog.pending()
        for child in self._children.registered():
            if not pending and (late := child._late_elsewhere(call)) is not None:
                error: MpiShareError = self.life.end_by(Event.DEADLINE, late)
                return error
        ranks = sorted({rank for ranks in pending.values() for rank in ranks})
        waits = "; ".join(f"{name} waits for {ranks}" for name, ranks in pending.items())
        text = f"{call} ({waits})" if waits else f"{call} (no rank is pending: the GPU is busy)"
        return self.agreement.timed_out(text, ranks)

    # --- closing

    def finish_at_exit(self, waits: bool) -> None:
        """At process exit: wait a moment for the work that began, unless an exception ends it.

        The others wait for that work. Polls, since a process that exits cannot start a thread.
        """
        deadline = time.monotonic() + (_FINISH_S if waits else 0.0)
        for child in self.children:
            if child._outlives_python:
                never_free(child)
            is_over = partial(lambda of: of._is_over() or self.life.failure is not None, child)
            with suppress(CudaError):  # work on a failed GPU never ends
                poll(is_over, deadline - time.monotonic())

    def begin_close(self, call: str) -> None:
        """Agree that an object is closed, once all streams are done. Collective."""
        self.agreement.step(call, lambda: self.drain(call))
        if self.checker is not None:
            self.checker.raise_races(call)

    def release_retained(self) -> None:
        """Try again to release the memory of closed windows that arrays held. Collective."""
        self.retained = [release for release in self.retained if not release()]
        self._many = max(_MANY, 2 * len(self.retained))

    def release_many(self) -> None:
        """Do so where there are many, which small windows would become. Collective."""
        if len(self.retained) >= self._many:
            self.release_retained()

    def close_in_order(
        self,
        call: str,
        release: Callable[[], Any],
        free: Callable[[list[Any]], Any],
        counters: Sequence[Counters] = (),
    ) -> list[Any]:
        """Close an object after `begin_close`: the importers release, then the owners free.

        Collective, host-blocking. `free` gets the results of `release` on all ranks; its own
        results on all ranks are returned. `counters` go back to the pool.
        """
        agreement = self.agreement
        released = agreement.step(call, release)

        def clear_and_free() -> Any:
            if agreement.rank == 0:
                for each in counters:
                    self.counter_pool.clear(each)
            return free(released)

        freed = agreement.step(call, clear_and_free)
        for each in counters:
            self.counter_pool.give(each)
        return freed

"""What the objects of one node stand on: its agreement, its backend, its counters."""

from __future__ import annotations

import operator
import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from mpishare.backends.suballocator import Suballocator
from mpishare.coordination.counters import SLOT_WORDS, Counters
from mpishare.memory.handle import Handle, boot_id
from mpishare.memory.shared import map_on_all_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.backends import Backend
    from mpishare.coordination.agreement import Agreement
    from mpishare.coordination.watchdog import Watchdog
    from mpishare.errors import MpiShareError
    from mpishare.memory.shared import SharedMemory

_LEAVE_S = 5.0
_CHUNK_WORDS = 1 << 16
_SPIN = 16


class Child(Protocol):
    """An object made from a node, which the node closes with itself."""

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        ...

    def close(self) -> None:
        """Close it. Collective."""
        ...

    def abandon(self) -> None:
        """Mark it closed without the other ranks. Local."""
        ...


class Plan(Child, Protocol):
    """A halo exchange: an object whose work may be under way when this process ends."""

    def leave(self, until: float) -> None:
        """Tell the other ranks if all that was begun is over by then, on the clock. Local."""
        ...


class Mapped(Protocol):
    """An open window, as what looks for an array in it sees it."""

    def find(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """Return whose segment holds these bytes of mine, and how far from its start."""
        ...

    def address_of(self, rank: int) -> int:
        """Return where a segment is mapped here."""
        ...


class Retained(Protocol):
    """A closed object whose memory the user's arrays hold."""

    def release(self, counters: Counters | None) -> bool:
        """Try once more to let go. Collective."""
        ...


class NodeContext:
    """What the objects of one node stand on.

    Parameters
    ----------
    agreement : Agreement
        How its ranks agree.
    backend : Backend
        Its memory and streams.
    watchdog : Watchdog
        Sees a rank die.
    nonces : list of str
        For each rank of the node, what names its process.
    uuids : list of str
        For each rank of the node, its GPU; empty on the host backend.
    """

    def __init__(
        self,
        agreement: Agreement,
        backend: Backend,
        watchdog: Watchdog,
        nonces: list[str],
        uuids: list[str],
    ) -> None:
        self.agreement = agreement
        self.backend = backend
        self.nonces = nonces
        self.uuids = uuids
        self.watchdog = watchdog
        self.spins_per_yield = _SPIN if agreement.size <= len(os.sched_getaffinity(0)) else 1
        """Looks at a counter before the core is given away: with more ranks than cores, who is
        waited for may need this very core."""
        self.children: list[Child] = []
        self.plans: list[Plan] = []
        """Halo exchanges: closed before the windows that their fields may be in."""
        self.windows: dict[int, Mapped] = {}
        """The open windows by number."""
        self.windows_version = 0
        """Raised whenever a window opens or closes."""
        self.retained: list[Retained] = []
        self.pieces = Suballocator(backend)
        self._chunks: list[SharedMemory] = []
        self._calls: dict[str, int] = {}

    @property
    def rank(self) -> int:
        """The rank of this process among those of the node."""
        return self.agreement.rank

    @property
    def size(self) -> int:
        """How many ranks the node has."""
        return self.agreement.size

    def rank_of(self, call: str, value: Any) -> int:
        """Return a rank that the user gave, or raise `TypeError` or `ValueError`."""
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{call} failed: {value!r} is not a rank of the node")
        rank = operator.index(value)
        if not 0 <= rank < self.size:
            raise ValueError(
                f"{call} failed: {value!r} is not a rank of the node (0 to {self.size - 1})"
            )
        return rank

    def number(self, kind: str) -> int:
        """Return the number of a new object of its kind, from 1, the same on every rank."""
        self._calls[kind] = self._calls.get(kind, 0) + 1
        return self._calls[kind]

    def handle(self, token: str, offset: int, nbytes: int, capacity: int) -> str:
        """Return the packed handle of a part of memory that this rank allocated."""
        return Handle(
            backend=self.backend.name,
            token=token,
            offset=offset,
            nbytes=nbytes,
            capacity=capacity,
            uuid=self.uuids[self.rank],
            nonce=self.nonces[self.rank],
            boot=boot_id(),
        ).pack()

    def take_counters(self, call: str, words: int) -> Counters:
        """Return zeroed counters, the same on every rank.

        Collective, since all ranks must take them in the same order; host-blocking where the
        control block is full and another chunk of shared memory must be mapped.
        """
        words = -(-words // SLOT_WORDS) * SLOT_WORDS
        pool = self.agreement.block.pool
        if not pool.has(words):
            self._add_chunk(call, max(words, _CHUNK_WORDS))
        return pool.take(words)

    def _add_chunk(self, call: str, words: int) -> None:
        agreement, backend = self.agreement, self.backend
        step = partial(agreement.step, call)
        memory = map_on_all_ranks(step, 8 * words, is_maker=agreement.rank == 0)
        memory.close_file()
        addresses: list[int] = []
        try:
            step(lambda: addresses.append(backend.register(memory)))
        except BaseException:
            if addresses:
                backend.unregister(memory)
            memory.close()
            raise
        # Only now, so that the pools of all ranks stay the same.
        self._chunks.append(memory)
        agreement.block.pool.add(memoryview(memory.buffer).cast("Q"), addresses[0])

    def synchronize(self, stream: Any, call: str) -> None:
        """Wait on the host for a stream, with the deadline; see `Node.synchronize`."""
        agreement, backend = self.agreement, self.backend
        agreement.check()
        if not backend.has_streams:
            return
        number, owner = backend.stream(stream)
        self.until(lambda: backend.is_done(number), call)
        del owner  # held until here

    def until(self, is_done: Callable[[], bool], call: str) -> None:
        """Wait on the host until something on a stream is over, with the deadline."""
        agreement = self.agreement
        deadline = time.monotonic() + agreement.timeout_s
        while not is_done():
            agreement.check()
            os.sched_yield()
            agreement.progress()
            # Asked again: this process may have been stopped since it asked.
            if time.monotonic() > deadline and not is_done():
                raise self.missing(call)
        self.check_signals()

    def drain(self, call: str) -> None:
        """Wait on the host for all streams of this process, with the deadline."""
        if not self.backend.drain(self.agreement.timeout_s):
            raise self.missing(call)
        self.check_signals()

    def find(self, address: int, nbytes: int) -> tuple[int, int, int] | None:
        """Return in which window memory is: its number, the rank of the segment, the offset."""
        for number, window in self.windows.items():
            found = window.find(address, nbytes)
            if found is not None:
                return number, *found
        return None

    def leave(self) -> None:
        """Let what plans have begun come to its end, if it does soon: this process ends. Local."""
        until = time.monotonic() + _LEAVE_S
        for plan in self.plans:
            plan.leave(until)

    def check_signals(self) -> None:
        """Raise if a wait that is over may be no signal: a watchdog of any rank releases waits."""
        agreement = self.agreement
        is_whole = not self.backend.has_streams or not agreement.block.is_broken()
        if agreement.failure is None and not is_whole:
            self.watchdog.look()
        agreement.check()

    def missing(self, call: str) -> MpiShareError:
        """Return the error for a stream that did not come to its end."""
        pending = self.watchdog.pending()
        ranks = sorted({rank for ranks in pending.values() for rank in ranks})
        waits = "; ".join(f"{name} waits for {ranks}" for name, ranks in pending.items())
        told = f"{call} ({waits})" if waits else f"{call} (no rank lags: the GPU itself is busy)"
        return self.agreement.timed_out(told, ranks, self.agreement.timeout_s)

    def begin_close(self, call: str) -> None:
        """Agree that an object is closed, once all streams have come to their end. Collective."""
        self.agreement.step(call, lambda: self.drain(call))

    def close_in_two(
        self,
        call: str,
        imports: Callable[[], Any],
        own: Callable[[list[Any]], Any],
        counters: Counters | None,
    ) -> list[Any]:
        """Close an object after `begin_close`: the importers let go, then the owners free.

        Collective, host-blocking.

        Parameters
        ----------
        imports : callable
            Lets go of what this rank imported.
        own : callable
            Frees what this rank owns, given what each rank's `imports` returned.
        counters : Counters, optional
            The object's, given back.

        Returns
        -------
        list
            What each rank's `own` returned.
        """
        agreement = self.agreement
        kept = agreement.step(call, imports)

        def free() -> Any:
            if counters is not None and agreement.rank == 0:
                agreement.block.pool.clear(counters)
            return own(kept)

        done = agreement.step(call, free)
        if counters is not None:
            agreement.block.pool.give(counters)
        return done

    def close_chunks(self) -> None:
        """Unmap the counters that were added. Local, last of all."""
        for memory in self._chunks:
            self.backend.unregister(memory)
            memory.close()


class NotPicklable:
    """Refuses to be pickled, by name: handles and mappings mean nothing elsewhere."""

    def __reduce__(self) -> Any:
        """Raise `TypeError`."""
        raise TypeError(
            f"an mpishare {type(self).__name__} cannot be pickled: it belongs to one process"
        )

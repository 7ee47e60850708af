"""Counter writes and waits: on a stream, or by the host itself."""

from __future__ import annotations

from os import sched_yield
from typing import TYPE_CHECKING, Any, NoReturn

from mpishare.backends.streams import handle_of
from mpishare.coordination.counters import NO_COUNTERS
from mpishare.coordination.poll import SPINS
from mpishare.errors import ClosedError
from mpishare.windows.stream_chain import StreamChain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.backends import Signals
    from mpishare.coordination.counters import Counters
    from mpishare.runtime.context import NodeContext


def spin_until(view: memoryview[int], slot: int, value: int, spins_per_yield: int) -> bool:
    """Spin until a counter has reached a value; return False if that takes too long for a spin.

    The caller then waits with a deadline, and watches the other ranks.
    """
    for spin in range(1, SPINS):
        if view[slot] >= value:
            return True
        if not spin % spins_per_yield:
            sched_yield()
    return view[slot] >= value


class CounterOp:
    """The counters that one call writes or waits for (`kind`), one for each of some other ranks.

    `counts` has the number of calls towards each rank of the node, shared by the operations of one
    call for all combinations of ranks.
    """

    __slots__ = ("call", "counts", "kind", "ranks", "signals", "slots")

    def __init__(self, call: str, kind: str, counts: list[int], slots: dict[int, int]) -> None:
        self.call = call
        self.kind = kind
        self.counts = counts
        self.ranks = tuple(slots)
        self.slots = tuple(slots.values())
        self.signals: Signals | None = None


class CounterOrdered:
    """An object whose calls write counters and wait for them."""

    def __init__(self, context: NodeContext, counters: Counters, name: str) -> None:
        self.name = name
        self._counters = counters
        self._check: Callable[..., None] = context.agreement.check
        self._wait_on_host = context.agreement.wait
        self._rank_of = context.rank_of
        self._backend = context.backend
        self._rank, self._size = context.rank, context.size
        self._view = counters.view
        self._memory_barrier = context.memory_barrier
        self._has_streams = context.backend.has_streams
        self._spins_per_yield = context.spins_per_yield
        self._chain = StreamChain(context.backend, name)
        # Functions, not methods: a dropped object would live until a collection of cycles.
        # On streams a wait costs the host as much as a write.
        kind, has_streams = CounterOrdered, self._has_streams
        self._write: Callable[[CounterOrdered, CounterOp, Any], None] = (
            kind._enqueue if has_streams else kind._store
        )
        """Raises the counters of an operation to the counts of its next call."""
        self._await: Callable[[CounterOrdered, CounterOp, Any], None] = (
            kind._enqueue if has_streams else kind._poll
        )
        """Waits until the counters of an operation have the counts of its next call."""

    def _enqueue(self, op: CounterOp, stream: Any) -> None:
        chain, counts, ranks = self._chain, op.counts, op.ranks
        number = chain.enter(op.call, stream)
        if ranks:
            if op.signals is None:
                op.signals = self._prepare([(op.kind, slot) for slot in op.slots])
            op.signals.enqueue(number, [counts[rank] + 1 for rank in ranks])
        if not chain.stays_alive:
            chain.leave()
        # Last: an interrupted call may be repeated, with the same effect.
        for rank in ranks:
            counts[rank] += 1

    def _store(self, op: CounterOp, stream: Any) -> None:
        if stream is not None:
            handle_of(stream)
        view, counts = self._view, op.counts
        self._memory_barrier()
        for slot, rank in zip(op.slots, op.ranks, strict=True):
            view[slot] = counts[rank] + 1
        for rank in op.ranks:
            counts[rank] += 1

    def _poll(self, op: CounterOp, stream: Any) -> None:
        if stream is not None:
            handle_of(stream)
        view, counts = self._view, op.counts
        waits = [(r, slot, counts[r] + 1) for r, slot in zip(op.ranks, op.slots, strict=True)]
        spins = 0
        for _, slot, value in waits:
            # `spin_until` inlined, as in a fence.
            while view[slot] < value:
                spins += 1
                if spins > SPINS:
                    self._wait(op.call, lambda: [r for r, s, v in waits if view[s] < v])
                elif not spins % self._spins_per_yield:
                    sched_yield()
        self._memory_barrier()
        for rank in op.ranks:
            counts[rank] += 1

    def _wait(self, call: str, pending: Callable[[], list[int]]) -> None:
        def still_pending() -> list[int]:
            if not self._view:  # a handler of a signal has closed the object, or left the node
                self._check()
            return pending()

        self._wait_on_host(f"{self.name}: {call}", still_pending)

    def _prepare(self, operations: Sequence[tuple[str, int]]) -> Signals:
        address = self._counters.address
        return self._backend.signals([(kind, address + 8 * slot) for kind, slot in operations])

    def _end(self) -> None:
        """Drop the counters: every later call raises `ClosedError`."""
        name = self.name

        def refuse(*_: Any) -> NoReturn:
            raise ClosedError(f"{name} is closed")

        self._check = refuse
        # Else a closed object that is still held would keep the control block mapped.
        self._counters = NO_COUNTERS
        self._view = NO_COUNTERS.view
        self._chain.end()

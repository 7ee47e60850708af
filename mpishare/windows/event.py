"""Events between ranks: the owner records, the waiters' streams wait, and none passes early.

A wait on an interprocess event binds to the latest record *called* so far, and an event that was
never recorded counts as done. So the owner counts its records in the control block, and a waiter
first waits until record k was called, then lets its stream wait for event k of a ring.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from mpishare.coordination.counters import NO_COUNTERS, SLOT_WORDS
from mpishare.errors import UnsupportedError
from mpishare.runtime.context import NodeObject
from mpishare.runtime.stream_chain import StreamChain
from mpishare.windows.arguments import agree, owner_of, receivers
from mpishare.windows.epochs import reach
from mpishare.windows.undo import meet_in, undoing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mpishare.memory.types import Stream
    from mpishare.runtime.context import NodeContext

# A record waits only for a waiter that is this far behind.
RING = 16

# Events of one owner: one more, so that the record that a waiter took last stays in place.
_EVENTS = RING + 1


class Event(NodeObject):
    """An event of one rank that streams of other ranks wait for. Made by `Node.event`.

    Calls raise `ClosedError` once the event is closed, and `PeerTimeout` or `PeerError` where a
    rank that they wait for is gone or late.

    Attributes
    ----------
    owner : int
        The rank that records, in ``node.comm``.
    waiters : tuple of int
        The ranks that wait.
    """

    _kind = "event"

    def __init__(self, context: NodeContext, owner: Any, waiters: Sequence[int] | None) -> None:
        call, backend = "Node.event", context.backend

        def check() -> tuple[dict[str, Any], None]:
            source = owner_of(context, call, owner)
            ranks = receivers(context, call, source, waiters, ("owner", "waiters"))
            for waiter in ranks if backend.has_streams else ():
                if why := context.why_no_event(source, waiter):
                    raise UnsupportedError(f"{call} failed: {why}")
            return {"owner": source, "waiters": ranks}, None

        source, ranks = agree(context, call, check)[0].values()
        with undoing(context, call) as undo:

            def create() -> tuple[list[Any], list[str]]:
                if context.rank != source:
                    return [], []
                events, tokens = backend.events(_EVENTS)
                undo.callback(backend.close_events, events)
                return events, tokens

            def open_them() -> tuple[list[Any], None]:
                if context.rank not in ranks:
                    return made, None
                events = backend.open_events(tokens[source])
                undo.callback(backend.close_events, events)
                return events, None

            made, tokens = context.agreement.step_keeping(call, create)
            meet_in(undo, context, call)
            events, _ = context.agreement.step_keeping(call, open_them)
            counters = context.take_counters(call, SLOT_WORDS * context.size)
        self.name = f"event {context.next_number('event')}"
        self.owner: int = source
        self.waiters: tuple[int, ...] = tuple(ranks)
        self._context = context
        self._counters = counters
        self._events = events
        self._rank = context.rank
        self._view = counters.view
        self._owner_slot = {source: SLOT_WORDS * source}
        self._waiter_slots = {rank: SLOT_WORDS * rank for rank in self.waiters}
        self._memory_barrier = context.memory_barrier
        self._has_streams = backend.has_streams
        self._count = 0  # records called by the owner, or taken by this waiter
        self._known = 0  # records that the others are known to have taken, or called
        self._chain = StreamChain(backend, self.name)
        context.register(self)

    def record(self, stream: Stream | None = None) -> None:
        """Record the work enqueued on my stream so far. Owner only.

        Local. Stream-ordered; waits on the host only for a waiter that has not taken the record of
        16 calls before.

        Parameters
        ----------
        stream : stream, optional
            Default: CuPy's current stream.

        Raises
        ------
        ValueError
            On a rank that is not the owner.
        PeerTimeout, PeerError
            If a waiter that this call waits for is gone or does not come.
        """
        self._check("record")
        if self._rank != self.owner:
            raise ValueError(
                f"{self.name}: record failed: rank {self.owner} is the owner, not rank {self._rank}"
            )
        self._use(self._context.backend.record, "record", stream, self._waiter_slots, RING)

    def wait(self, stream: Stream | None = None) -> None:
        """Let my stream wait for the owner's next record that I have not waited for yet.

        Local. Stream-ordered; waits on the host until the owner has *called* that record.

        Parameters
        ----------
        stream : stream, optional
            Default: CuPy's current stream.

        Raises
        ------
        ValueError
            On a rank that is not a waiter.
        PeerTimeout, PeerError
            If the owner is gone or does not come.
        """
        self._check("wait")
        if self._rank not in self.waiters:
            raise ValueError(
                f"{self.name}: wait failed: rank {self._rank} is not one of the waiters "
                f"{list(self.waiters)}"
            )
        self._use(self._context.backend.wait_event, "wait", stream, self._owner_slot, 0)

    @property
    def is_done(self) -> bool:
        """Whether the work of the newest record is done. Local; does not block.

        On the owner the newest record is that of its last `record`, on a waiter the one that its
        last `wait` took: the owner may have called later ones. True before the first `record` or
        `wait`, as CUDA has it for an event that was never recorded. On the host backend a record is
        done when it is called, so this is always True.

        Raises
        ------
        ValueError
            On a rank that neither records nor waits.
        PeerError, PeerTimeout
            If a rank is gone: then the state of its work is unknown.
        """
        self._check("is_done")
        if not self._events:
            raise ValueError(
                f"{self.name}: is_done failed: rank {self._rank} is neither the owner "
                f"{self.owner} nor one of the waiters {list(self.waiters)}"
            )
        return bool(self._context.backend.is_event_done(self._events[self._count % _EVENTS]))

    def close(self) -> None:
        """Close the event on all ranks.

        Collective, host-blocking: waits for this rank's streams, and for the other ranks.
        """
        if self._is_closed:
            return
        context, is_owner = self._context, self._context.rank == self.owner
        context.agreement.check()
        destroy = partial(context.backend.close_events, self._events)
        with context.agreement.collective():
            context.begin_close(f"{self.name}: close")
            self._is_closed = True
            # The importers first: an event may not be used once its exporter has destroyed it.
            context.close_in_order(
                f"{self.name}: close",
                lambda: None if is_owner else destroy(),
                lambda _: destroy() if is_owner else None,
                [self._counters],
            )
        self._abandon()

    def _abandon(self) -> None:
        self._is_closed = True
        self._counters = NO_COUNTERS
        self._view = NO_COUNTERS.view
        self._chain.end()
        self._context.unregister(self)

    def __repr__(self) -> str:
        ranks = f"owner={self.owner}, waiters={self.waiters}"
        return f"<mpishare.{self.name.capitalize()}: {ranks}{self._state()}>"

    def _is_over(self) -> bool:
        return self._chain.is_over()

    def _use(
        self,
        use: Callable[[Any, int], None],
        call: str,
        stream: Any,
        slots: Mapping[int, int],
        lag: int,
    ) -> None:
        """Record the next event or wait for it, once the others are at most `lag` behind."""
        context, number = self._context, self._chain.enter(call, stream)
        count = self._count + 1
        if count - lag > self._known:
            self._known = reach(context, f"{self.name}: {call}", self._view, slots, count - lag)
        elif self._has_streams:
            context.check_released()
        if self._has_streams:
            use(self._events[count % _EVENTS], number)
            self._chain.leave()
        self._memory_barrier()
        self._view[SLOT_WORDS * self._rank] = count
        self._count = count

    def _check(self, call: str) -> None:
        self._context.agreement.check()
        if self._is_closed:
            raise self._closed(f"{self.name}: {call}")

"""Events between ranks: the owner records, the waiters' streams wait, and none passes early.

The owner counts its calls of `record`, and its stream the records that are done, both in the
control block. A waiter first waits until record k was called, then lets its stream wait for k.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishare.coordination.counters import NO_COUNTERS, SLOT_WORDS
from mpishare.runtime.context import NodeObject
from mpishare.runtime.stream_chain import StreamChain
from mpishare.windows.arguments import agree, owner_of, receivers
from mpishare.windows.epochs import reach

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.memory.types import Stream
    from mpishare.runtime.context import NodeContext

_CALLED, _DONE = 0, SLOT_WORDS  # the places of the counters


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
            return {"owner": source, "waiters": ranks}, None

        source, ranks = agree(context, call, check)[0].values()
        counters = context.take_counters(call, 2 * SLOT_WORDS)
        self.name = f"event {context.next_number('event')}"
        self.owner: int = source
        self.waiters: tuple[int, ...] = tuple(ranks)
        self._context = context
        self._counters = counters
        self._rank = context.rank
        self._view = counters.view
        self._memory_barrier = context.memory_barrier
        self._has_streams = backend.has_streams
        # Without streams a record is done when it is called.
        self._done = _DONE if self._has_streams else _CALLED
        if self._has_streams:
            kind = "write" if self._rank == source else "wait"
            self._signals = backend.signals([(kind, counters.address + 8 * _DONE)])
        self._count = 0  # records called by the owner, or taken by this waiter
        self._known = 0  # records that the owner is known to have called
        self._chain = StreamChain(backend, self.name)
        context.register(self)

    def record(self, stream: Stream | None = None) -> None:
        """Record the work enqueued on my stream so far. Owner only.

        Local. Stream-ordered; waits for no other rank.

        Parameters
        ----------
        stream : stream, optional
            Default: CuPy's current stream.

        Raises
        ------
        ValueError
            On a rank that is not the owner.
        """
        self._check("record")
        if self._rank != self.owner:
            raise ValueError(
                f"{self.name}: record failed: rank {self.owner} is the owner, not rank {self._rank}"
            )
        number, count = self._chain.enter("record", stream), self._count + 1
        self._enqueue(number, count)
        self._memory_barrier()
        self._view[_CALLED] = self._count = count

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
        number, count = self._chain.enter("wait", stream), self._count + 1
        if count > self._known:
            call, slots = f"{self.name}: wait", {self.owner: _CALLED}
            self._known = reach(self._context, call, self._view, slots, count)
        self._enqueue(number, count)
        self._count = count

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
        if self._rank not in (self.owner, *self.waiters):
            raise ValueError(
                f"{self.name}: is_done failed: rank {self._rank} is neither the owner "
                f"{self.owner} nor one of the waiters {list(self.waiters)}"
            )
        is_done = self._view[self._done] >= self._count
        self._check("is_done")  # a failure raises the counter, too
        return is_done

    def close(self) -> None:
        """Close the event on all ranks.

        Collective, host-blocking: waits for this rank's streams, and for the other ranks.
        """
        if self._is_closed:
            return
        context, call = self._context, f"{self.name}: close"
        context.agreement.check()
        with context.agreement.collective():
            context.begin_close(call)
            self._is_closed = True
            context.close_in_order(call, int, lambda _: None, [self._counters])
        self._abandon()

    def _abandon(self) -> None:
        self._is_closed = True
        self._context.unregister(self)
        self._counters = NO_COUNTERS
        self._view = NO_COUNTERS.view
        self._chain.end()

    def __repr__(self) -> str:
        ranks = f"owner={self.owner}, waiters={self.waiters}"
        return f"<mpishare.{self.name.capitalize()}: {ranks}{self._state()}>"

    def _is_over(self) -> bool:
        return self._chain.is_over()

    def _pending(self) -> list[int]:
        """Return the owner if this rank's stream waits for it."""
        is_waiting = self._rank in self.waiters and self._view[self._done] < self._count
        return [self.owner] if is_waiting else []

    def _enqueue(self, stream: int, count: int) -> None:
        if self._has_streams:
            self._signals.enqueue(stream, [count])
            self._chain.leave()

    def _check(self, call: str) -> None:
        self._context.agreement.check()
        if self._is_closed:
            raise self._closed(f"{self.name}: {call}")

"""Order between ranks: fences and MPI's active-target calls, by counters that only grow.

A counter has one writer. Rank r announces epoch e by raising its counter to e on its stream, after
the work of that epoch; another rank's stream waits until it is at least e. On the host backend the
calls themselves store and poll the same counters, and block.
"""

from __future__ import annotations

from functools import cached_property
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from mpishare.backends import handle_of
from mpishare.coordination.counters import NO_COUNTERS, SLOT_WORDS, whole_slots
from mpishare.coordination.poll import spin_until
from mpishare.coordination.waits import NO_THREAD
from mpishare.errors import EpochError, closed
from mpishare.runtime.stream_chain import StreamChain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from mpishare.backends import Signals
    from mpishare.coordination.counters import Counters
    from mpishare.memory.types import Stream
    from mpishare.runtime.context import NodeContext


class CounterOp:
    """The counters that one call writes or waits for (`kind`), one for each of some other ranks.

    `counts` has the number of calls towards each rank of the node, shared by the operations of one
    call for all combinations of ranks.
    """

    __slots__ = ("call", "counts", "kind", "places", "ranks", "signals")

    def __init__(self, call: str, kind: str, counts: list[int], slots: dict[int, int]) -> None:
        self.call = call
        self.kind = kind
        self.counts = counts
        self.ranks = tuple(slots)
        self.places = tuple(slots.items())  # ranks and their slots
        self.signals: Signals | None = None

    def count(self) -> None:
        """Count a call that was made."""
        for rank in self.ranks:
            self.counts[rank] += 1


class Group(NamedTuple):
    """Ranks that were named together, with the counter operations of each call."""

    ranks: tuple[int, ...]
    post: CounterOp
    start: CounterOp
    complete: CounterOp
    wait: CounterOp


class Epochs:
    """The epochs of one window; `counters` are `epoch_counters` many, zeroed."""

    def __init__(self, context: NodeContext, counters: Counters, name: str) -> None:
        self.name = name
        self._counters = counters
        self._check: Callable[..., None] = context.agreement.check
        self._agreement = context.agreement
        self._rank_of = context.rank_of
        self._backend = context.backend
        self._rank, self._size = context.rank, context.size
        self._view = counters.view
        self._memory_barrier = context.memory_barrier
        self._has_streams = context.backend.has_streams
        self._spins_per_yield = context.spins_per_yield
        self._chain = StreamChain(context.backend, name)
        # Functions, not methods: a dropped object would live until a collection of cycles. On a
        # stream a wait costs the host as much as a write.
        self._write = Epochs._enqueue if self._has_streams else Epochs._store
        self._await = Epochs._enqueue if self._has_streams else Epochs._poll
        self._epoch = 0
        self._rounds, self._waits = context.fence_rounds
        self._operations = len(self._rounds) + len(self._waits)
        self._make_fence = context.fence
        # Both sides of a pair count, without communication.
        self._exposed = [0] * self._size  # posts to each origin
        self._completed = [0] * self._size  # done signals awaited from each origin
        self._accessed = [0] * self._size  # ready signals awaited from each target
        self._finished = [0] * self._size  # completes towards each target
        self._groups: dict[tuple[Any, ...], Group] = {}
        self._exposure: Group | None = None
        self._access: Group | None = None
        self._fence_signals: Signals | None = None

    # --- fence

    @cached_property
    def _meet(self) -> Callable[[int], Any]:
        """The fence on the host, made at its first call: `Node.share_all` makes hundreds."""
        return self._make_fence(self._view, [(write, [*waits]) for write, waits in self._rounds])

    def fence(self, stream: Stream | None = None) -> None:
        """Order the work enqueued on all ranks before it against the work enqueued after it.

        Collective over the node. Stream-ordered on CUDA: returns without waiting for the GPU. On
        the host backend it blocks until every rank of the node has called it.

        Parameters
        ----------
        stream : stream, optional
            The stream to order. Default: CuPy's current one.
        """
        agreement = self._agreement
        # Written for speed, as a fence on the host is little more than the call.
        is_closed = self._counters is NO_COUNTERS
        if is_closed or agreement.life.failure is not None or get_ident() != agreement.thread:
            self._check()
        epoch = self._epoch + 1
        if stream is not None and not self._has_streams:
            handle_of(stream)
        if self._has_streams:
            self._enqueue_fence(stream, epoch)
        else:
            # `Blocked` by hand: its block takes a tenth of a fence.
            thread, agreement.thread = agreement.thread, NO_THREAD
            try:
                while (slot := self._meet(epoch)) >= 0:
                    agreement.wait(f"{self.name}: fence", lambda: self._behind(epoch, slot))
            except BaseException as error:
                # The others count this fence, and this rank does not.
                agreement.life.leave(f"{self.name}: fence", error)
                raise
            finally:
                agreement.thread = thread
        self._epoch = epoch

    def _enqueue_fence(self, stream: Any, epoch: int) -> None:
        number = self._chain.enter("fence", stream)
        if self._fence_signals is None:
            operations = []
            for write, waits in self._rounds:
                operations.append(("write", write))
                operations += [("wait", slot) for slot in waits]
            self._fence_signals = self._prepare(operations)
        self._fence_signals.enqueue(number, [epoch] * self._operations)
        self._chain.leave()

    # --- pairs: post, start, complete, wait

    def post(self, ranks: Sequence[int], stream: Stream | None = None) -> None:
        """Let `ranks` access this rank's segment, after the work on this rank's stream so far.

        Local. Stream-ordered on CUDA; does not block on the host backend either.

        Parameters
        ----------
        ranks : sequence of int
            The origins, ranks in ``node.comm``; each must call `start` naming this rank. Empty is
            allowed.
        stream : stream, optional
            Default: CuPy's current stream.

        Raises
        ------
        EpochError
            If the last exposure has not been waited for.
        TypeError, ValueError
            If these are no ranks of the node, or one is named twice.
        """
        group = self._group("post", ranks)
        if self._exposure is not None:
            raise EpochError(
                f"{self.name}: post failed: the exposure to ranks {list(self._exposure.ranks)} is "
                "still open. Call wait() first."
            )
        self._write(self, group.post, stream)
        self._exposure = group

    def start(self, ranks: Sequence[int], stream: Stream | None = None) -> None:
        """Begin to access the segments of `ranks`: later work on the stream follows their post.

        Local. Stream-ordered on CUDA; on the host backend it blocks until each has posted.

        Parameters
        ----------
        ranks : sequence of int
            The targets, ranks in ``node.comm``; each must call `post` naming this rank.
        stream : stream, optional
            Default: CuPy's current stream.

        Raises
        ------
        EpochError
            If an access is open already.
        PeerTimeout, PeerError
            If a rank is gone or has not posted by the deadline: here on the host backend, from
            `Node.synchronize` on CUDA.
        """
        group = self._group("start", ranks)
        if self._access is not None:
            raise EpochError(
                f"{self.name}: start failed: the access to ranks {list(self._access.ranks)} is "
                "still open. Call complete() first."
            )
        self._await(self, group.start, stream)
        self._access = group

    def complete(self, stream: Stream | None = None) -> None:
        """End the access: the stream's work so far is visible to the targets after their wait.

        Local. Stream-ordered on CUDA; does not block on the host backend either.

        Raises
        ------
        EpochError
            Without a `start`.
        """
        self._check()
        if self._access is None:
            raise EpochError(
                f"{self.name}: complete failed: no access is open. Call start() first."
            )
        group = self._access
        self._write(self, group.complete, stream)
        self._access = None

    def wait(self, stream: Stream | None = None) -> None:
        """End the exposure: later work on the stream follows the origins' complete.

        Local. Stream-ordered on CUDA; on the host backend it blocks until each has completed.

        Raises
        ------
        EpochError
            Without a `post`.
        PeerTimeout, PeerError
            As `start`, of ranks that have not completed.
        """
        self._check()
        if self._exposure is None:
            raise EpochError(f"{self.name}: wait failed: nothing is exposed. Call post() first.")
        group = self._exposure
        self._await(self, group.wait, stream)
        self._exposure = None

    # --- counters, on streams or by the host itself

    def _enqueue(self, op: CounterOp, stream: Any) -> None:
        chain, counts, ranks = self._chain, op.counts, op.ranks
        number = chain.enter(op.call, stream)
        if ranks:
            if op.signals is None:
                op.signals = self._prepare([(op.kind, slot) for _, slot in op.places])
            op.signals.enqueue(number, [counts[rank] + 1 for rank in ranks])
        if not chain.stays_alive:
            chain.leave()
        op.count()

    def _store(self, op: CounterOp, stream: Any) -> None:
        if stream is not None:
            handle_of(stream)
        view, counts = self._view, op.counts
        self._memory_barrier()
        for rank, slot in op.places:
            view[slot] = counts[rank] + 1
        op.count()

    def _poll(self, op: CounterOp, stream: Any) -> None:
        if stream is not None:
            handle_of(stream)
        view, counts, places = self._view, op.counts, op.places
        agreement = self._agreement
        thread, agreement.thread = agreement.thread, NO_THREAD  # `Blocked` by hand, as in `fence`
        try:
            for rank, slot in places:
                value = counts[rank] + 1
                if view[slot] < value and not spin_until(view, slot, value, self._spins_per_yield):
                    call = f"{self.name}: {op.call}"
                    agreement.wait(call, lambda: [r for r, s in places if view[s] <= counts[r]])
        except BaseException as error:
            agreement.life.leave(f"{self.name}: {op.call}", error)
            raise
        finally:
            agreement.thread = thread
        self._memory_barrier()
        op.count()

    def _prepare(self, operations: Sequence[tuple[str, int]]) -> Signals:
        address = self._counters.address
        return self._backend.signals([(kind, address + 8 * slot) for kind, slot in operations])

    # --- pending ranks and groups

    def _end(self) -> None:
        """Drop the counters: every later call raises `ClosedError`."""
        name = self.name

        def refuse(*_: Any) -> NoReturn:
            raise closed(name)

        self._check = self._meet = refuse
        # Else a closed object that is still held would keep the control block mapped.
        self._counters = NO_COUNTERS
        self._view = NO_COUNTERS.view
        self._chain.end()

    def _is_over(self) -> bool:
        """Return whether this rank's signals are written, and those of others waited for."""
        return self._chain.is_over()

    def _pending(self) -> list[int]:
        """Return the ranks for whose signals this rank's calls wait."""
        view, mine, size = self._view, self._rank, self._size
        behind = set(self._behind(self._epoch))
        for rank in range(size):
            if (
                view[ready(rank, mine, size)] < self._accessed[rank]
                or view[done(rank, mine, size)] < self._completed[rank]
            ):
                behind.add(rank)
        return sorted(behind)

    def _behind(self, epoch: int, slot: int | None = None) -> list[int]:
        """Return the ranks that a fence waits for at `slot`, or at any; the absent ones first."""
        view = self._view
        if slot is not None and view[slot] >= epoch:
            return []
        # A rank that waits for others has written its own first word: the others are absent.
        absent = [r for r in range(self._size) if r != self._rank and view[SLOT_WORDS * r] < epoch]
        if absent:
            return absent
        return [rank for at, rank in self._waits if view[at] < epoch and slot in (None, at)]

    def _group(self, call: str, ranks: Iterable[int]) -> Group:
        self._check()
        try:
            key = tuple(ranks)
        except TypeError:
            raise TypeError(
                f"{self.name}: {call} failed: {ranks!r} is not a list of ranks, such as [0]"
            ) from None
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = self._new_group(call, key)
        return group

    def _new_group(self, call: str, key: tuple[Any, ...]) -> Group:
        ranks = tuple(self._rank_of(f"{self.name}: {call}", rank) for rank in key)
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"{self.name}: {call} failed: {list(ranks)} names a rank twice")
        mine, size = self._rank, self._size
        posted = {rank: ready(mine, rank, size) for rank in ranks}
        started = {rank: ready(rank, mine, size) for rank in ranks}
        completed = {rank: done(mine, rank, size) for rank in ranks}
        waited = {rank: done(rank, mine, size) for rank in ranks}
        return Group(
            ranks,
            CounterOp("post", "write", self._exposed, posted),
            CounterOp("start", "wait", self._accessed, started),
            CounterOp("complete", "write", self._finished, completed),
            CounterOp("wait", "wait", self._completed, waited),
        )


def reach(
    context: NodeContext, call: str, view: memoryview[int], slots: Mapping[int, int], count: int
) -> int:
    """Wait on the host until these slots are at least `count`, and return the least of them.

    They are given by the rank that writes them. Without any the least is `count`.
    """
    agreement = context.agreement
    for slot in slots.values():
        if view[slot] < count:
            with agreement.blocked(call):
                if not spin_until(view, slot, count, context.spins_per_yield):
                    agreement.wait(call, lambda: [r for r, s in slots.items() if view[s] < count])
    context.memory_barrier()
    if context.backend.has_streams:  # on the host no failure raises a counter
        context.check_released()
    return min([view[slot] for slot in slots.values()], default=count)


def epoch_counters(size: int) -> int:
    """Return the number of counters of a window on a node of `size` ranks."""
    return size * (SLOT_WORDS + 2 * whole_slots(size))  # each rank writes to slots of its own


def ready(writer: int, reader: int, size: int) -> int:
    """Return the place of the counter of posts, from target to origin."""
    return SLOT_WORDS * size + whole_slots(size) * writer + reader


def done(writer: int, reader: int, size: int) -> int:
    """Return the place of the counter of completes, from origin to target."""
    row = whole_slots(size)
    return (SLOT_WORDS + row) * size + row * writer + reader

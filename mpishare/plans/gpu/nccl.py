"""The communicator of NCCL that the plans of a group of ranks share: made, connected, ended."""

from __future__ import annotations

import atexit
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from mpishare.backends import driver
from mpishare.backends.cuda_graphs import captured
from mpishare.backends.graph_nodes import events_of
from mpishare.backends.nccl import Communicator, NcclError, load
from mpishare.coordination.abort import say
from mpishare.coordination.life import Event
from mpishare.coordination.poll import poll
from mpishare.errors import PeerError, UnsupportedError, name_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    import numpy as np

    from mpishare.backends.driver import CudaGraph
    from mpishare.backends.nccl import Move
    from mpishare.backends.suballocator import Suballocation
    from mpishare.errors import PeerTimeout
    from mpishare.plans.comm import PlanComm
    from mpishare.plans.gpu.graphs import GraphCache

    Reduction = Callable[[int, int], None]
    """Called with the address of the elements, and a stream."""

_EXIT_S = 5.0
_CALL_S = 1.0
"""How long the end of a communicator waits for a call that is under way in it."""
_ending: list[tuple[threading.Thread, Collection[GraphCache | CudaGraph]]] = []
"""Threads that end communicators, with graphs. No other call of NCCL may be made meanwhile."""
_kept: list[NcclRanks] = []
"""Closed ones that graphs of the program may have: ended before others are made, not at exit."""


class NcclRanks:
    """The ranks of a group as NCCL knows them, until their node is closed or over.

    Collective to make, host-blocking with the deadline: NCCL may wait for a rank for good.
    """

    def __init__(self, comm: PlanComm, call: str) -> None:
        self._backend: Any = comm.context.backend
        self._life = comm.context.life
        self._comms: list[Communicator] = []
        self._probe: Callable[[int], None] | None = None
        self._events: set[int] | None = None
        self.graphs: WeakSet[GraphCache | CudaGraph] = WeakSet()
        """Those that have messages. As long as there is one, the communicator does not end."""
        self.is_in_foreign_graphs = False
        self._calls = threading.Lock()
        """Held by what calls NCCL, which must not run beside the end of its communicator."""
        self._connected: set[int] = set()
        self._everyone = [rank for rank in range(comm.size) if rank != comm.rank]
        self._agreement = comm.context.agreement
        self._over = threading.Event()
        # Started now: a process that exits, and may have to end it then, cannot start a thread.
        self._worker = threading.Thread(
            target=self._abort_once_over, name="mpishare-nccl", daemon=True
        )

        def begin() -> str:
            self._backend.make_current()
            _await_ends(comm, call)
            return "" if comm.rank else load().unique_id()

        # What may fail on one rank alone comes before NCCL waits for all.
        name = comm.step(call, begin)[0]
        self._life.at_end.append(self.end)
        self._life.at_exit.add(_join_ends)
        self._worker.start()
        try:
            comm.step(call, lambda: self._make(comm, name, call))
        except BaseException:
            self.close()
            raise

    @classmethod
    def of(cls, comm: PlanComm, call: str) -> NcclRanks:
        """Return those of a plan's ranks, which the node keeps. Collective, host-blocking."""
        kept, key = comm.context.nccl, comm.ranks
        # Ranks on other nodes may have closed theirs, and made new ones.
        if not all(comm.step(call, lambda: key in kept and kept[key].is_open)):
            if key in kept:
                kept.pop(key).close()
            kept[key] = cls(comm, call)
        made: NcclRanks = kept[key]
        return made

    @property
    def is_open(self) -> bool:
        return not self._over.is_set()

    def _make(self, comm: PlanComm, name: str, call: str) -> None:
        with self._in_use() as comms:
            comms.append(Communicator.begin(comm.size, comm.rank, name))
        comm.wait_anywhere(call, lambda: self._everyone, self._is_ready, moves=False)
        with self._in_use() as comms:
            comms.insert(0, comms[0].begin_child())
        comm.wait_anywhere(call, lambda: self._everyone, self._is_ready, moves=False)

    @contextmanager
    def _in_use(self) -> Iterator[list[Communicator]]:
        """Keep them from being ended meanwhile; raises if the watchdog has ended the node."""
        with self._calls:
            self._require_open()
            yield self._comms

    def _require_open(self) -> None:
        if self._over.is_set():
            self._agreement.check()
            raise NcclError("the communicator of these ranks has ended")

    def _is_ready(self) -> bool:
        with self._in_use() as comms:
            return comms[-1].is_ready()  # of the parent, also for its child

    def connect(self, comm: PlanComm, call: str, peers: Iterable[int]) -> None:
        """Send a first message to each peer. Collective, host-blocking; no kernel may wait now.

        NCCL makes connections by it, and allocates memory, which waits for all kernels.
        """
        new = sorted({*peers} - self._connected)
        if not any(comm.step(call, lambda: bool(new))):
            return

        def send(address: int, stream: int) -> None:
            sends = [(address + at, 1, peer) for at, peer in enumerate(new)]
            recvs = [(address + len(new) + at, 1, peer) for at, peer in enumerate(new)]
            self._probe = self.bind(sends, recvs)
            self._probe(stream)

        self._try_first(comm, call, 2 * max(len(new), 1), new, send)
        self._connected.update(new)

    def connect_reduction(
        self, comm: PlanComm, call: str, dtype: np.dtype[Any], name: str, count: int
    ) -> Reduction:
        """Return what combines so many elements of all ranks, once it has. As `connect`."""
        reduce = self._bound(lambda each: each.bind_reduction(dtype.str[1:], name, count))
        self._try_first(comm, call, max(count, 1) * dtype.itemsize, self._everyone, reduce)
        return reduce

    def _try_first(
        self, comm: PlanComm, call: str, nbytes: int, peers: Sequence[int], send: Reduction
    ) -> None:
        """Make a first call with these ranks, in memory of so many bytes, and wait for its end."""
        context, backend = comm.context, self._backend

        def prepare() -> tuple[tuple[int, Suballocation], None]:
            context.drain(call)
            stream = int(backend.new_stream())
            return (stream, context.suballocator.allocate(nbytes)), None

        (stream, block), _ = comm.step_keeping(call, prepare)
        failed: list[BaseException] = []

        def begin() -> None:
            try:
                backend.make_current()
                send(block.address, stream)
            except BaseException as error:
                failed.append(error)

        worker = threading.Thread(target=begin, name="mpishare-nccl", daemon=True)

        def is_done() -> bool:
            return not worker.is_alive() and (bool(failed) or backend.is_done(stream))

        def exchange() -> None:
            if peers:
                worker.start()
                comm.wait_anywhere(call, lambda: peers, is_done, moves=False)
            if failed:
                raise failed[0]

        try:
            comm.step(call, exchange)
        except BaseException:
            self.close()  # a first message may be on its way: a later plan makes a new one
            raise
        backend.close_stream(stream)
        block.close()

    def bind(self, sends: Sequence[Move], recvs: Sequence[Move]) -> Callable[[int], None]:
        """Return the function that enqueues messages on a stream, one kernel for all of them."""
        return self._bound(lambda each: each.bind(sends, recvs))

    def _bound(self, bind: Callable[[Communicator], Callable[..., None]]) -> Callable[..., None]:
        """Return the calls that the communicator binds, until it has ended."""
        with self._in_use() as comms:
            bound = bind(comms[0])

        def call(*arguments: int) -> None:
            with self._calls:  # as `_in_use`, which takes longer
                self._require_open()
                bound(*arguments)

        return call

    def events(self) -> set[int]:
        """Return those by which NCCL orders graphs of its messages, of one that is never sent."""
        if self._probe is None:
            return set()  # there is no other rank
        if self._events is None:
            stream = int(self._backend.new_stream())
            graph = captured(driver.Step(self._probe), stream, "NCCL")
            self._events = events_of(int(graph))
            driver.call("cuGraphDestroy", graph)
            self._backend.close_stream(stream)
        return self._events

    def check(self) -> None:
        """Raise `NcclError` if NCCL has lost a rank, which it sees over a network. Any thread."""
        if self._calls.acquire(blocking=False):  # else it is asked again soon
            try:
                for each in self._comms if self.is_open else ():
                    each.is_ready()
            finally:
                self._calls.release()

    def end(self) -> None:
        """Release the streams that wait in it, at once, and end it. Local, of any thread."""
        if self.is_open:
            _ending.append((self._worker, self.graphs))
            self._over.set()

    def _abort_once_over(self) -> None:
        self._over.wait()
        # No call begins any more. One that NCCL holds up for good ends by the first turn, and what
        # it has made by then by the second.
        for limit_s in (_CALL_S, -1):
            if self._calls.acquire(timeout=limit_s):
                self._calls.release()
            while self._comms:  # the child first
                self._comms.pop(0).abort()

    def close(self) -> None:
        """End it once nothing is under way in it. Local.

        Later if graphs may have it that nobody else can destroy: a process that exits while NCCL
        waits for that crashes.
        """
        with suppress(ValueError):  # the watchdog has it
            self._life.at_end.remove(self.end)
        if self.is_in_foreign_graphs and self._life.failure is None:
            _kept.append(self)
        else:
            self.end()


class NcclPeers:
    """The ranks that one engine of a plan reaches by NCCL, connected and watched.

    Collective to make over the plan, host-blocking. `progress` is the number of calls that are done
    on this GPU, and whether one is under way.
    """

    def __init__(self, comm: PlanComm, name: str, call: str, peers: Sequence[int]) -> None:
        self.ranks = NcclRanks.of(comm, name)
        self.ranks.connect(comm, name, peers)
        self._comm, self._call = comm, call
        # Those that errors name: a rank of this node is seen to be late by the node.
        self._far = [rank for rank in peers if rank not in comm.ranks_here] or peers
        self._done, self._since = 0, time.monotonic()

    def check(self, progress: tuple[int, bool]) -> None:
        """End the node where a peer is lost, or a call takes longer than the deadline.

        No host waits for these messages, so the watchdog does, in its thread.
        """
        agreement, now = self._comm.context.agreement, time.monotonic()
        try:
            self.ranks.check()
        except NcclError as error:
            lost = dict.fromkeys(self._far, str(error))
            text = f"{self._call} failed: NCCL has lost {name_ranks(self._far)}: {error}"
            agreement.life.end(Event.DEATH, PeerError(text, failures=lost))
        done, is_under_way = progress
        if done != self._done or not is_under_way:
            self._done, self._since = done, now
        elif now - self._since > agreement.timeout_s:
            agreement.life.end(Event.DEADLINE, self._comm.late(self._call, self._far))

    def late(self, call: str, progress: tuple[int, bool]) -> PeerTimeout | None:
        """Return the error of the peers, if this rank's stream waits for one of them."""
        return self._comm.late(call, self._far) if progress[1] else None


def _await_ends(comm: PlanComm, call: str) -> None:
    """Wait until the communicators of nodes that are over have ended."""
    agreement = comm.context.agreement
    while _kept:
        _kept.pop().end()
    if not poll(
        _have_ended,
        agreement.timeout_s / 2,  # the others wait for this rank meanwhile
        agreement.check_whole,
    ):
        raise UnsupportedError(
            f"{call} failed: NCCL still ends a communicator of a node that is over, since a CUDA "
            "graph has its messages. Delete that graph first."
        )


@atexit.register
def _join_ends() -> None:
    """Let communicators end before CUDA does, unless graphs keep them."""
    if not poll(_have_ended, _EXIT_S):
        _ending.clear()
        say(
            "mpishare: NCCL still ends a communicator of a node that is over, since a CUDA graph "
            "has its messages, and may crash as this process ends. Delete that graph before\n"
        )


def _have_ended() -> bool:
    """Whether all communicators have, once none of our graphs has their messages any more.

    Not for the threads that end them: this one may launch a graph.
    """
    for each in [*_ending]:  # the watchdog may add one meanwhile
        worker, caches = each
        for graphs in [*caches]:
            graphs.close()
        if not worker.is_alive():
            _ending.remove(each)
    return not _ending

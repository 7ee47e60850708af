"""Routes ``copy``, ``pinned`` and MPI: pack, let streams or the host wait, unpack.

There are two binary flags for each pair of ranks: the sender sets `ready`, the receiver `consumed`
(see `mpishare.plans.gpu.signals`). MPI messages are sent and waited for by the host, stage by
stage, once all work of other routes is on the stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.backends import driver
from mpishare.backends.driver import launch_graph
from mpishare.halo.cuda.records import PACK, PACK_AND_ZERO, UNPACK
from mpishare.halo.cuda.work_items import Slot
from mpishare.plans.gpu.graphs import GraphCache
from mpishare.plans.gpu.signals import Signals, set_flags, wait_and_reset
from mpishare.runtime.route import COPY, PINNED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from mpishare.halo.cuda.buffers import Buffers
    from mpishare.halo.cuda.direction import Direction
    from mpishare.halo.cuda.kernels import Launcher
    from mpishare.halo.cuda.mpi_stages import MpiStage
    from mpishare.halo.cuda.work_items import WorkList
    from mpishare.plans.gpu.flags import PinnedFlags
    from mpishare.plans.message import Message, Part
    from mpishare.plans.mpi_route import MpiMessages
    from mpishare.runtime.context import NodeContext

    Handles = tuple[dict[Any, int], dict[Any, int]]
    _Received = tuple[Message, list[tuple[Part, Slot]]]  # with the packed place of each part

_BY_STREAM = (COPY, PINNED)


class StreamedRoutes:
    """The launches, signals and messages between this rank and its neighbors that are not fused."""

    def __init__(
        self,
        context: NodeContext,
        direction: Direction,
        buffers: Buffers,
        launcher: Launcher,
        alignments: Sequence[int],
    ) -> None:
        self._context = context
        self._backend = context.backend
        self._where = launcher.where
        self._pointers = launcher.pointers
        self.stages = buffers.stages
        """MPI messages, for which the host waits."""
        self._unpacked = buffers.unpacked
        self._graphs: tuple[GraphCache, GraphCache] | None = None
        self._packs = list(_packs(direction, buffers, launcher, alignments))
        self._in_place = buffers.in_place
        self._beside_in_place: driver.Launch | None = None
        make = _adds if direction.is_reverse else _unpacks
        self._unpacks = list(make(_by_stream(direction, buffers), launcher, alignments))
        self._unpacks_of_stages = [
            list(make(_of_stage(stage), launcher, alignments)) for stage in self.stages
        ]
        peers = direction.peers(*_BY_STREAM)
        self._has_signals = bool(peers)
        if self._in_place is not None and (self._has_signals or _has_local(direction)):
            self._beside_in_place = _first_pack(direction, buffers, launcher, alignments, ())
        self._make_signals(direction, buffers.flags, peers)

    def _make_signals(self, direction: Direction, flags: PinnedFlags, peers: Sequence[int]) -> None:
        backend, rank = self._backend, direction.rank
        targets = [p for p in peers if any(message.peer == p for message in direction.sends)]
        sources = [p for p in peers if any(message.peer == p for message in direction.recvs)]
        self._set_ready = Signals(backend, set_flags([flags.ready(rank, p) for p in targets]))
        self._wait_ready = Signals(backend, wait_and_reset([flags.ready(p, rank) for p in sources]))
        self._exchange_consumed = Signals(
            backend,
            [
                *set_flags([flags.consumed(rank, p) for p in sources]),
                *wait_and_reset([flags.consumed(p, rank) for p in targets]),
            ],
        )

    def cache_graphs(self, launcher: Launcher, capturing: int, handles: Handles) -> bool:
        """Launch by graphs from now on, if an exchange is only MPI messages of one stage.

        Return whether it is. Packing and unpacking graphs are published in the two dicts, by
        `key_of` the fields' addresses.
        """
        launches = [launch for each in self._unpacks_of_stages for launch in each]
        if not len(self.stages) == len(self._packs) == len(launches) == 1 or self._has_signals:
            return False
        pointers, where = launcher.pointers, launcher.where
        self._graphs = (
            GraphCache(pointers, where, self._packs[0], capturing, handles[0]),
            GraphCache(pointers, where, launches[0], capturing, handles[1]),
        )
        return True

    @property
    def replayed_in_place(self) -> Mapping[Any, MpiMessages | None]:
        """MPI messages that are a whole exchange, by `key_of` the fields' addresses."""
        if self._in_place is None or self._beside_in_place is not None:
            return {}
        return self._in_place.bound

    def replay(self, found: MpiMessages | tuple[int, int], stream: int, where: str) -> None:
        """Exchange by messages in place, or by the two graphs of `cache_graphs`."""
        self.replay_pack(found, stream, where)
        self.replay_messages(found, stream, where)

    def replay_pack(self, found: MpiMessages | tuple[int, int], stream: int, where: str) -> None:
        """Enqueue the part of a replay that precedes other routes."""
        if isinstance(found, tuple):
            launch_graph(found[0], stream, where)

    def replay_messages(
        self, found: MpiMessages | tuple[int, int], stream: int, where: str
    ) -> None:
        """Do the rest of a replay: wait for the stream, send, receive and unpack."""
        if not isinstance(found, tuple):
            self._wait_for_stream(stream, where)
            found.send()
            found.wait()
            return
        # The last unpack precedes it on the stream. Receives, the slowest MPI call, overlap with
        # the packing.
        self._wait_on_host(self._unpacked)
        messages = self.stages[0].messages
        messages.receive()
        self._wait_for_stream(stream, where)
        messages.send()
        messages.wait()
        launch_graph(found[1], stream, where)
        self._backend.record(self._unpacked, stream)

    def close(self) -> None:
        for cache in self._graphs or ():
            cache.close()

    def start(self, stream: int, addresses: tuple[int, ...]) -> None:
        """Pack the fields at these addresses and signal that they are ready."""
        self._pointers[:] = [*addresses]
        if self._in_place is not None and self._in_place.of(addresses) is not None:
            if self._beside_in_place is not None:
                self._beside_in_place.enqueue(stream)
            self._set_ready.enqueue(stream)
            # By then the owned cells are written, and the ghosts no longer read.
            self._backend.record(self.stages[0].packed, stream)
            return
        first, *rest = self._packs
        if self._graphs is None:
            first.enqueue(stream)
        else:
            self._graphs[0].enqueue(stream, addresses, is_captured=False)
        self._set_ready.enqueue(stream)
        if not self.stages:
            return
        self._backend.record(self.stages[0].packed, stream)
        for launch, stage in zip(rest, self.stages[1:], strict=True):
            launch.enqueue(stream)
            self._backend.record(stage.packed, stream)

    def receive(self, addresses: tuple[int, ...]) -> None:
        """Start the receives of packed messages, if their buffers are free."""
        if not self.stages or (
            self._in_place is not None and self._in_place.of(addresses) is not None
        ):
            return
        # Else the last exchange's unpacks still read them. They precede these packs on the stream,
        # so that `wait` need not check again.
        if self._backend.is_event_done(self._unpacked):
            for stage in self.stages:
                stage.messages.receive()

    def wait(self, stream: int, addresses: tuple[int, ...]) -> None:
        """Wait for the neighbors' cells and unpack them into the fields at these addresses."""
        self._pointers[:] = [*addresses]
        self._wait_ready.enqueue(stream)
        for launch in self._unpacks:
            launch.enqueue(stream)
        self._exchange_consumed.enqueue(stream)
        in_place = None if self._in_place is None else self._in_place.of(addresses)
        if in_place is not None:
            self._wait_on_host(self.stages[0].packed)
            in_place.send()
            in_place.wait()
            return
        for stage in self.stages:
            self._wait_on_host(stage.packed)
            stage.messages.send()
        for stage, launches in zip(self.stages, self._unpacks_of_stages, strict=True):
            stage.messages.wait()
            if self._graphs is not None:
                self._graphs[1].enqueue(stream, addresses, is_captured=False)
                break
            for launch in launches:
                launch.enqueue(stream)
        if self.stages:
            self._backend.record(self._unpacked, stream)

    def _wait_for_stream(self, stream: int, where: str) -> None:
        """Wait on the host for all work on a stream, with the node's deadline."""
        if driver.is_done(stream, where):
            self._context.check_released()
        else:
            self._context.wait_until(lambda: driver.is_done(stream, where), where)

    def _wait_on_host(self, event: Any) -> None:
        """Wait on the host for an event, with the node's deadline."""
        if driver.is_event_done(event, self._where):
            self._context.check_released()
        else:
            is_done = driver.is_event_done
            self._context.wait_until(lambda: is_done(event, self._where), self._where)


def _by_stream(direction: Direction, buffers: Buffers) -> Iterator[_Received]:
    for message in direction.recvs:
        if direction.mine[message.peer] in _BY_STREAM:
            yield message, [(part, buffers.incoming(message, part)) for part in message.parts]


def _of_stage(stage: MpiStage) -> Iterator[_Received]:
    for message in stage.recvs:
        yield message, [(part, Slot(address)) for part, address in stage.incoming(message)]


def _packs(
    direction: Direction, buffers: Buffers, launcher: Launcher, alignments: Sequence[int]
) -> Iterator[driver.Launch]:
    """Yield a launch per stage, one at least: the first also packs for the streamed routes."""
    yield _first_pack(direction, buffers, launcher, alignments, buffers.stages[:1])
    kind = PACK_AND_ZERO if direction.is_reverse else PACK
    for stage in buffers.stages[1:]:
        work = launcher.work_list(alignments)
        _add_stage(work, kind, stage)
        yield launcher.prepare("streamed", work.load(), 0, 0)


def _first_pack(
    direction: Direction,
    buffers: Buffers,
    launcher: Launcher,
    alignments: Sequence[int],
    stages: Iterable[MpiStage],
) -> driver.Launch:
    """Return the launch that packs for the streamed routes, and for some of the stages."""
    kind = PACK_AND_ZERO if direction.is_reverse else PACK
    work = launcher.work_list(alignments)
    for message, part in direction.outgoing(*_BY_STREAM):
        work.add_copy(kind, part, buffers.outgoing(message, part))
    if not direction.has_fused:
        for part, target in direction.local():
            work.add_local(part, target)
    for stage in stages:
        _add_stage(work, kind, stage)
    # Launched with no items, too: it counts the exchanges that have begun.
    pointers = launcher.state("streamed"), buffers.flags.started
    return launcher.prepare("streamed", work.load(), *pointers)


def _has_local(direction: Direction) -> bool:
    """Whether a rank sends to itself, and no fused kernel carries these cells."""
    return not direction.has_fused and any(True for _ in direction.local())


def _add_stage(work: WorkList, kind: int, stage: MpiStage) -> None:
    for part, address in stage.outgoing():
        work.add_copy(kind, part, Slot(address))


def _unpacks(
    received: Iterable[_Received], launcher: Launcher, alignments: Sequence[int]
) -> Iterator[driver.Launch]:
    """Yield one launch, if there is anything to unpack."""
    work = launcher.work_list(alignments)
    for _, parts in received:
        for part, slot in parts:
            work.add_copy(UNPACK, part, slot)
    if len(work):
        yield launcher.prepare("streamed", work.load(), 0, 0)


def _adds(
    received: Iterable[_Received], launcher: Launcher, alignments: Sequence[int]
) -> Iterator[driver.Launch]:
    """Yield a launch per pass of each message."""
    for message, places in received:
        packed = {part.field: slot for part, slot in places}
        for parts in _passes(message):
            work = launcher.work_list(alignments)
            for part, rows in parts:
                work.add_sum(part, packed[part.field].address, rows)
            yield launcher.prepare("add", work.load())


def _passes(message: Message) -> Iterator[list[tuple[Part, Any]]]:
    """Split a message so that no pass names a cell twice; yield (part, rows), None for all rows.

    Pass k has the k-th occurrence of each index, so that sums keep the order of the message.
    """
    occurrences = [
        None if part.indices is None else _occurrence(part.indices) for part in message.parts
    ]
    last = max(
        (int(each.max()) for each in occurrences if each is not None and len(each)), default=0
    )
    for number in range(last + 1):
        found: list[tuple[Part, Any]] = []
        for part, occurrence in zip(message.parts, occurrences, strict=True):
            if occurrence is None:
                if number == 0:
                    found.append((part, None))
            elif (occurrence == number).any():
                found.append((part, np.flatnonzero(occurrence == number)))
        yield found


def _occurrence(indices: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return for each index the number of its occurrences before."""
    order = np.argsort(indices, kind="stable")
    ordered = indices[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]][: len(ordered)])
    found = np.empty(len(indices), np.int64)
    begin = np.repeat(starts, np.diff(np.r_[starts, len(ordered)]).astype(int))
    found[order] = np.arange(len(ordered)) - begin
    return found

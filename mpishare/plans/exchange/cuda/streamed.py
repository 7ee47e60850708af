"""Routes ``copy``, ``pinned`` and MPI: pack, let streams or the host wait, unpack.

Ranks whose streams wait for each other have flags (`Handshake`) and two buffers (epochs.cuh). MPI
messages are sent and waited for by the host, once all work of other routes is on the stream.
"""

from __future__ import annotations

import functools
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.backends import driver
from mpishare.plans.cells import Box
from mpishare.plans.exchange.cuda.records import PACK, PACK_AND_ZERO, UNPACK
from mpishare.plans.gpu.flags import Handshake
from mpishare.plans.gpu.graphs import GraphCache
from mpishare.plans.message import received
from mpishare.runtime.route import COPY, LOCAL, PINNED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from mpishare.plans.exchange.cuda.buffers import Buffers
    from mpishare.plans.exchange.cuda.direction import Direction
    from mpishare.plans.exchange.cuda.fused import Fused
    from mpishare.plans.exchange.cuda.kernels import Launcher
    from mpishare.plans.exchange.cuda.mpi_buffers import Packed
    from mpishare.plans.exchange.cuda.work_items import Slot
    from mpishare.plans.message import Part
    from mpishare.runtime.context import NodeContext

_BY_STREAM = (COPY, PINNED)


class StreamedRoutes:
    """The launches, signals and messages between this rank and its neighbors that are not fused.

    `may_stay`: NCCL takes contiguous cells out of the fields (`NcclMessages`).
    """

    def __init__(
        self,
        context: NodeContext,
        direction: Direction,
        buffers: Buffers,
        launcher: Launcher,
        alignments: Sequence[int],
        *,
        may_stay: bool,
    ) -> None:
        self._context = context
        self._backend = context.backend
        self._where = launcher.where
        self._pointers = launcher.pointers
        self._mpi = buffers.mpi  # for whose messages the host waits
        self.nccl = buffers.nccl
        self._has_signals = bool(buffers.flags.streamed)
        self._handshake = Handshake(self._backend, buffers.flags)
        sent, by_nccl = ([], []) if self.nccl is None else self.nccl.packed(may_stay=may_stay)
        # Where all cells stay where they are, the kernels that pack and unpack only count.
        here = chain(direction.sent(*_BY_STREAM), direction.received(*_BY_STREAM, LOCAL))
        is_moved = any(sent) or any(by_nccl) or any(here) or self._has_signals
        is_aside = self.nccl is not None and not is_moved
        epochs, flags = launcher.state("epochs", 3), buffers.flags
        local = () if direction.has_fused else [*direction.local()]

        def copy(name: str, kind: int, count: int, local: Any, parts: Any) -> driver.Enqueued:
            """Prepare the launch that packs or unpacks parts, and counts the epoch."""
            work = launcher.work_list(alignments)
            for part, slot in parts:
                work.add_copy(kind, part, slot)
            for part, target in local:
                work.add_local(part, target)
            launch = launcher.prepare(name, work.load(), epochs, count)
            return launcher.asides.of(launch, is_aside=is_aside)

        kind = PACK_AND_ZERO if direction.adds else PACK
        pack = functools.partial(copy, "pack", kind, flags.begun, local)
        unpack = functools.partial(copy, "unpack", UNPACK, flags.done, ())

        def receive(messages: Sequence[Packed]) -> list[driver.Enqueued]:
            if direction.adds:
                return _adds(messages, launcher, alignments, flags.done)
            return [unpack(chain.from_iterable(messages))] if any(messages) else []

        by_stream = [
            [(part, buffers.slot(key, part)) for key, part in received([message], direction.rank)]
            for message in direction.by(*_BY_STREAM)[1]
        ]
        sent_here = [(p, buffers.slot(key, p)) for key, p in direction.sent(*_BY_STREAM)]
        by_mpi = [] if self._mpi is None else self._mpi.sent
        # Launched with no items, too: it begins the epoch.
        self._pack = pack([*sent_here, *chain.from_iterable(sent + by_mpi)])
        self._unpacks = receive(by_stream + by_nccl)
        if (self._has_signals or self.nccl is not None) and not self._unpacks:
            self._unpacks.append(unpack(()))  # which ends the epoch
        self._unpacks_of_mpi = [] if self._mpi is None else receive(self._mpi.received)

    def whole(
        self, fused: Fused | None, capturing: int, handles: dict[Any, int]
    ) -> GraphCache | None:
        """Return the launches of an exchange as one; None for those with which a host waits.

        And for those by flags alone, which are launched one by one. `handles` has their graphs.
        """
        if self._mpi is not None or (self._has_signals and self.nccl is None):
            return None
        between = [] if fused is None else [fused.alone.launch]
        if self.nccl is not None:
            between.append(self.nccl)
            capturing = capturing if self.nccl.may_be_captured else 0
        pack, unpack = [self._pack, self._handshake.ready], [self._handshake.seen, *self._unpacks]
        launch = driver.InOrder([*pack, *between, *unpack])
        return GraphCache(self._pointers, self._where, launch, capturing, handles)

    @property
    def has_messages(self) -> bool:
        return self._mpi is not None

    def start(self, stream: int, addresses: tuple[int, ...]) -> None:
        """Pack the fields at these addresses and signal that they are ready."""
        self._pointers[:] = [*addresses]
        self._pack.enqueue(stream)
        self._handshake.ready.enqueue(stream)
        if self._mpi is not None:
            self._backend.record(self._mpi.packed, stream)

    def wait(self, stream: int, addresses: tuple[int, ...]) -> None:
        """Wait for the neighbors' cells and unpack them into the fields at these addresses."""
        self._pointers[:] = [*addresses]
        self._handshake.seen.enqueue(stream)
        for launch in self._unpacks:
            launch.enqueue(stream)
        if self._mpi is None:
            return
        # The last call's unpacks, which read the buffers of what comes, precede these packs.
        self._wait_for_packs(self._mpi.packed)
        self._mpi.messages.exchange()
        for launch in self._unpacks_of_mpi:
            launch.enqueue(stream)

    def _wait_for_packs(self, packed: Any) -> None:
        """Wait on the host for an event, with the node's deadline."""
        if driver.is_event_done(packed, self._where):
            self._context.check_released()
        else:
            self._context.wait_until(lambda: driver.is_event_done(packed, self._where), self._where)


def _adds(
    messages: Iterable[Packed], launcher: Launcher, alignments: Sequence[int], done: int
) -> list[driver.Enqueued]:
    """Return a launch per pass of each message; the last ends the epoch."""
    passes = [*chain.from_iterable(map(_passes, messages))]
    launches: list[driver.Enqueued] = []
    epochs = launcher.state("epochs", 3)
    for number, parts in enumerate(passes, start=1):
        work = launcher.work_list(alignments)
        for part, slot, rows in parts:
            work.add_sum(part, slot, rows)
        is_last = number == len(passes)
        launches.append(launcher.prepare("add", work.load(), epochs, done if is_last else 0))
    return launches


def _passes(message: Packed) -> Iterator[list[tuple[Part, Slot, Any]]]:
    """Split a message so that no pass names a cell twice; with the rows, None for all of them.

    Pass k has the k-th occurrence of each index, or the boxes that share cells with one of the pass
    before, so that sums keep the order of the message.
    """
    turns = _turns_of_boxes([part for part, _ in message])
    parts = [
        (part, slot, turns[at : at + 1] if part.indices is None else _occurrence(part.indices))
        for at, (part, slot) in enumerate(message)
    ]
    last = max((int(each.max(initial=0)) for *_, each in parts), default=0)
    for number in range(last + 1):
        yield [
            (part, slot, None if part.indices is None else np.flatnonzero(each == number))
            for part, slot, each in parts
            if number in each
        ]


def _turns_of_boxes(parts: Sequence[Part]) -> np.ndarray[Any, Any]:
    """Return for each part how many before it must be added first, since they share its cells."""
    boxes: list[tuple[int, tuple[int, Box]]] = []
    turns = np.zeros(len(parts), np.int64)
    for at, part in enumerate(parts):
        if part.axis is not None:
            continue  # the only one of its field
        box = Box(*zip(*((each.start, each.stop) for each in part.key), strict=True))
        before = [n for n, (field, other) in boxes if field == part.field and (box & other).size]
        turns[at] = max((turns[n] + 1 for n in before), default=0)
        boxes.append((at, (part.field, box)))
    return turns


def _occurrence(indices: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return for each index the number of its occurrences before."""
    order = np.argsort(indices, kind="stable")
    ordered = indices[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]][: len(ordered)])
    found = np.empty(len(indices), np.int64)
    begin = np.repeat(starts, np.diff(np.r_[starts, len(ordered)]).astype(int))
    found[order] = np.arange(len(ordered)) - begin
    return found

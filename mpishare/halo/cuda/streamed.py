"""Routes ``copy``, ``pinned`` and ``mpi``: pack, let streams or the host wait, unpack.

Two binary flags per pair of ranks: the sender sets `ready`, the receiver `consumed`. The rank that
waits for a flag resets it to 0. Nothing is counted, so that a captured graph can replay the same
operations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpishare.halo.cuda.records import PACK, PACK_AND_ZERO, UNPACK
from mpishare.halo.routes import BY_MPI

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mpishare.backends import Backend, driver
    from mpishare.context import NodeContext
    from mpishare.halo.cuda.buffers import Buffers
    from mpishare.halo.cuda.direction import Direction
    from mpishare.halo.cuda.kernels import Launcher
    from mpishare.halo.message import Message, Part

_ROUTES = ("copy", "pinned", *BY_MPI)


class StreamedRoutes:
    """The launches and signals between this rank and its neighbors that are not fused. Local.

    Parameters
    ----------
    context : NodeContext
        The node's.
    direction, buffers, launcher
        Of one direction of a plan.
    alignments : sequence of int, bytes
        For each field, what its address is a multiple of.
    """

    def __init__(
        self,
        context: NodeContext,
        direction: Direction,
        buffers: Buffers,
        launcher: Launcher,
        alignments: Sequence[int],
    ) -> None:
        self._context = context
        self._backend = backend = context.backend
        self._where = launcher.where
        self._pointers = launcher.pointers
        self._mpi = buffers.mpi
        self._pack = _pack(direction, buffers, launcher, alignments)
        make = _adds if direction.is_reverse else _unpack
        self._unpacks = list(make(direction, buffers, launcher, alignments))
        flags, rank = buffers.flags, direction.rank
        peers = direction.peers("copy", "pinned")
        targets = [p for p in peers if any(message.peer == p for message in direction.sends)]
        sources = [p for p in peers if any(message.peer == p for message in direction.recvs)]
        self._set_ready = _Signals(
            backend, [_Op("write", flags.ready(rank, p), 1) for p in targets]
        )
        self._wait_ready = _Signals(
            backend, [each for p in sources for each in _wait_and_reset(flags.ready(p, rank))]
        )
        self._exchange_consumed = _Signals(
            backend,
            [
                *[_Op("write", flags.consumed(rank, p), 1) for p in sources],
                *[each for p in targets for each in _wait_and_reset(flags.consumed(p, rank))],
            ],
        )

    def start(self, stream: int, addresses: Sequence[int]) -> None:
        """Pack the fields at these addresses and signal that they are ready."""
        self._pointers[:] = [*addresses]
        mpi = self._mpi
        self._pack.enqueue(stream)
        if mpi is not None and self._backend.is_event_done(mpi.unpacked):
            # Else the last exchange's unpack still reads the receive buffers. It is before this
            # pack on its stream, so that `wait` need not look again.
            mpi.messages.receive()
        if mpi is not None:
            self._backend.record(mpi.packed, stream)
        self._set_ready.enqueue(stream)

    def wait(self, stream: int, addresses: Sequence[int]) -> None:
        """Wait for the neighbors' cells and unpack them into the fields at these addresses."""
        self._pointers[:] = [*addresses]
        mpi = self._mpi
        if mpi is not None:
            self._wait_on_host(mpi.packed)
            mpi.messages.send()
            mpi.messages.wait()
        self._wait_ready.enqueue(stream)
        for launch in self._unpacks:
            launch.enqueue(stream)
        self._exchange_consumed.enqueue(stream)
        if mpi is not None:
            self._backend.record(mpi.unpacked, stream)

    def _wait_on_host(self, event: Any) -> None:
        """Wait on the host for an event, with the node's deadline."""
        is_done = self._backend.is_event_done
        self._context.wait_until(lambda: is_done(event), self._where)


def _pack(
    direction: Direction, buffers: Buffers, launcher: Launcher, alignments: Sequence[int]
) -> driver.Launch:
    work = launcher.work_list(alignments)
    kind = PACK_AND_ZERO if direction.is_reverse else PACK
    for message, part in direction.outgoing(*_ROUTES):
        work.add_copy(kind, part, buffers.outgoing(message, part))
    if not direction.has_fused:
        for part, target in direction.local():
            work.add_local(part, target)
    # Launched with no items, too: it counts the exchanges that have begun.
    pointers = launcher.state("streamed"), buffers.flags.started
    return launcher.prepare("streamed", work.load(), *pointers)


def _unpack(
    direction: Direction, buffers: Buffers, launcher: Launcher, alignments: Sequence[int]
) -> Iterator[driver.Launch]:
    work = launcher.work_list(alignments)
    for message, part in direction.incoming(*_ROUTES):
        work.add_copy(UNPACK, part, buffers.incoming(message, part))
    if len(work):
        yield launcher.prepare("streamed", work.load(), 0, 0)


def _adds(
    direction: Direction, buffers: Buffers, launcher: Launcher, alignments: Sequence[int]
) -> Iterator[driver.Launch]:
    """Yield a launch per pass of each message."""
    for message in direction.recvs:
        packed = {part.field: buffers.incoming(message, part) for part in message.parts}
        for parts in _passes(message):
            work = launcher.work_list(alignments)
            for part, rows in parts:
                work.add_sum(part, packed[part.field].address, rows)
            yield launcher.prepare("add", work.load())


class _Op(NamedTuple):
    kind: str
    address: int
    value: int


class _Signals:
    """Counter operations whose values never change."""

    def __init__(self, backend: Backend, operations: Sequence[_Op]) -> None:
        self._values = [each.value for each in operations]
        self._signals = backend.signals([(each.kind, each.address) for each in operations])

    def enqueue(self, stream: int) -> None:
        """Enqueue them on a stream."""
        if self._values:
            self._signals.enqueue(stream, self._values)


def _wait_and_reset(address: int) -> tuple[_Op, _Op]:
    return _Op("wait", address, 1), _Op("write", address, 0)


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
    """Return for each index how often it occurred before."""
    order = np.argsort(indices, kind="stable")
    ordered = indices[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]][: len(ordered)])
    found = np.empty(len(indices), np.int64)
    begin = np.repeat(starts, np.diff(np.r_[starts, len(ordered)]).astype(int))
    found[order] = np.arange(len(ordered)) - begin
    return found

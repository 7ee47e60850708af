"""Routes ``copy``, ``pinned`` and ``mpi``: pack, let streams or messages wait, unpack.

A word of the plan says to each neighbor that cells are there, and another to each sender that they
were taken. Whoever waits for a word sets it back to 0: so nothing is counted, and the same
operations are right when a captured graph replays them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.halo.cuda.work_items import LOCAL, PACK, PACK_AND_ZERO, UNPACK, WorkList

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mpishare.backends import driver
    from mpishare.halo.cuda.resources import PlanResources
    from mpishare.halo.message import Message, Part

_RELAYED = ("copy", "pinned", "mpi")


class StreamedRoutes:
    """The launches and signals of one plan for all neighbors that are not fused. Local.

    Parameters
    ----------
    resources : PlanResources
        The plan's.
    most : sequence of int, bytes
        For each field, what its address is a multiple of.
    """

    def __init__(self, resources: PlanResources, most: Sequence[int]) -> None:
        self._resources = resources
        self._most = most
        mine, rank = resources.mine, resources.rank
        self._pack = self._make_pack()
        self._takes = list(self._make_adds() if resources.is_reverse else self._make_unpack())
        words, signals = resources.words, resources.backend.signals
        by_words = [p for p, r in mine.items() if r in ("copy", "pinned") and p != rank]
        to = [p for p in by_words if any(message.peer == p for message in resources.sends)]
        of = [p for p in by_words if any(message.peer == p for message in resources.recvs)]
        self._say = _Batch(signals, [("write", words.data(rank, p), 1) for p in to])
        hear = [each for p in of for each in _await(words.data(p, rank))]
        self._hear = _Batch(signals, hear)
        thank = [("write", words.taken(rank, p), 1) for p in of]
        heard = [each for p in to for each in _await(words.taken(p, rank))]
        self._thank = _Batch(signals, [*thank, *heard])
        self._mail = resources.mail

    def start(self, number: int, places: Sequence[int]) -> None:
        """Pack everything that is not fused, and say so: the fields are at `places`."""
        self._resources.pointers[:] = [*places]
        if self._mail is not None:
            # What came last may still be read out of the buffers.
            self._until_done(self._resources.taken)
            self._mail.receive()
        self._pack.enqueue(number)
        if self._mail is not None:
            self._resources.backend.record(self._resources.packed, number)
        self._say.enqueue(number)

    def wait(self, number: int, places: Sequence[int]) -> None:
        """Unpack everything that is not fused once it is there."""
        self._resources.pointers[:] = [*places]
        if self._mail is not None:
            self._until_done(self._resources.packed)
            self._mail.send()
            self._mail.wait()
        self._hear.enqueue(number)
        for launch in self._takes:
            launch.enqueue(number)
        self._thank.enqueue(number)
        if self._mail is not None:
            self._resources.backend.record(self._resources.taken, number)

    def _until_done(self, event: Any) -> None:
        """Wait on the host for an event, with the deadline."""
        resources = self._resources
        is_done = resources.backend.is_event_done
        resources.ranks.context.wait_until(lambda: is_done(event), resources.where)

    def _make_pack(self) -> driver.Launch:
        resources = self._resources
        table = WorkList(resources.layouts, self._most, resources.upload)
        kind = PACK_AND_ZERO if resources.is_reverse else PACK
        for message in resources.sends:
            if resources.mine[message.peer] in _RELAYED:
                for part in message.parts:
                    table.move(kind, part, resources.outgoing(message, part))
        if not resources.has_fused:
            for message, target in resources.local():
                for part, other in zip(message.parts, target.parts, strict=True):
                    table.move(LOCAL, part, 0, target=other)
        # Without anything to pack the kernel still says that this exchange has begun.
        return self._launch("relay", table, resources.state("relay"), resources.words.started)

    def _make_unpack(self) -> Iterator[driver.Launch]:
        resources = self._resources
        table = WorkList(resources.layouts, self._most, resources.upload)
        for message in resources.recvs:
            if resources.mine[message.peer] in _RELAYED:
                for part in message.parts:
                    table.move(UNPACK, part, resources.incoming(message, part))
        if len(table):
            yield self._launch("relay", table, 0, 0)

    def _make_adds(self) -> Iterator[driver.Launch]:
        """One launch a message, and one more each time that it names a cell again."""
        resources = self._resources
        for message in resources.recvs:
            packed = {part.field: resources.incoming(message, part) for part in message.parts}
            for parts in _passes(message):
                table = WorkList(resources.layouts, self._most, resources.upload)
                for part, row in parts:
                    table.add(part, packed[part.field], row)
                yield self._launch("add", table)

    def _launch(self, name: str, table: WorkList, *rest: int) -> driver.Launch:
        return self._resources.launch(name, table.load(), *rest)


class _Batch:
    """Counter operations with values that are always the same."""

    def __init__(self, signals: Any, operations: Sequence[tuple[str, int, int]]) -> None:
        self._values = [value for _, _, value in operations]
        self._signals = signals([(kind, at) for kind, at, _ in operations])

    def enqueue(self, number: int) -> None:
        """Put them on a stream."""
        if self._values:
            self._signals.enqueue(number, self._values)


def _await(address: int) -> list[tuple[str, int, int]]:
    return [("wait", address, 1), ("write", address, 0)]


def _passes(message: Message) -> Iterator[list[tuple[Part, Any]]]:
    """Cut a message so that no cell is named twice in one pass; with each part, which of its rows.

    The k-th pass has the k-th time that each place is named: sums keep the order of the message.
    """
    rows: list[tuple[Part, Any]] = []
    last = 0
    for part in message.parts:
        turns = None if part.indices is None else _times_before(part.indices)
        rows.append((part, turns))
        if turns is not None and len(turns):
            last = max(last, int(turns.max()))
    for turn in range(last + 1):
        found: list[tuple[Part, Any]] = []
        for part, turns in rows:
            if turns is None:
                if turn == 0:
                    found.append((part, None))
            elif (turns == turn).any():
                found.append((part, np.flatnonzero(turns == turn)))
        yield found


def _times_before(places: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return how often each place was named before."""
    order = np.argsort(places, kind="stable")
    ordered = places[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]][: len(ordered)])
    found = np.empty(len(places), np.int64)
    begin = np.repeat(starts, np.diff(np.r_[starts, len(ordered)]).astype(int))
    found[order] = np.arange(len(ordered)) - begin
    return found

"""What a rank packs, copies and receives by route ``host``: computed once per plan."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from mpishare.halo.host.copies import SelfCopy, block_for_cache
from mpishare.halo.message import PartKey, parts_sent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from mpishare.halo.engine import PlanSetup
    from mpishare.halo.host.copies import Array
    from mpishare.halo.host.staging import DoubleBuffer
    from mpishare.halo.message import Message, Part

    Buffers = tuple[Array, Array] | None
    """The packed cells in even and in odd epochs; None if they are read from the process."""

_MIN_IN_PLACE_NBYTES = 16 << 10  # below, packing costs less than waiting for all readers


class Outgoing(NamedTuple):
    """A part that this rank sends to another one."""

    field: int
    key: Any
    buffers: Buffers


class Incoming(NamedTuple):
    """A part that this rank receives: `key` indexes it here, `source_key` in the sender's field.

    `source_key` is None if the part is not a box: then only the sender knows its indices.
    """

    name: PartKey
    key: Any
    source_key: Any
    buffers: Buffers


class Staged(NamedTuple):
    """A part and its buffer, to copy one into the other for whatever field a call names."""

    field: int
    key: Any
    buffer: Array


@dataclass(frozen=True, eq=False, slots=True)
class Sender:
    """Consecutive parts from one rank: its rank in the plan, its control words, the parts.

    `staged` are the parts with buffers, in even and in odd epochs.
    """

    rank: int
    control: memoryview[int]
    parts: list[Incoming]
    staged: tuple[list[Staged], list[Staged]]


@dataclass(frozen=True)
class RouteParts:
    """Everything that the calls of a plan have in common, whatever fields they name.

    Attributes
    ----------
    outgoing : list of Outgoing
        To other ranks.
    staged : pair of list of Staged
        Those that have buffers, in even and in odd epochs.
    self_copies : list of SelfCopy
        To this rank; none in the reverse exchange, where they come in their turn, by `senders`.
    senders : list of Sender
        In the order in which their parts are stored.
    in_place : list of bool
        Per field, whether other ranks read it in place if it is in a window.
    """

    outgoing: list[Outgoing]
    staged: tuple[list[Staged], list[Staged]]
    self_copies: list[SelfCopy]
    senders: list[Sender]
    in_place: list[bool]


def lay_out(
    setup: PlanSetup,
    sends: Sequence[Message],
    recvs: Sequence[Message],
    staging: DoubleBuffer,
    *,
    is_reverse: bool,
) -> RouteParts:
    """Find out where the cells of these messages come from and where they go.

    Parameters
    ----------
    sends, recvs : sequence of Message
        What takes this route, the messages of this rank to itself included.
    """
    mine = setup.comm.rank
    outgoing = [
        Outgoing(part.field, part.key, staging.buffers(key, part.shape))
        for key, part in _sent(sends, mine)
        if key.receiver != mine
    ]
    sources = _source_keys(setup, sends, is_reverse=is_reverse)
    incoming = [
        Incoming(key, part.key, sources[key], staging.buffers(key, part.shape))
        for key, part in _received(recvs, mine)
    ]
    copies: list[SelfCopy] = []
    if not is_reverse:  # the order is free: own cells first, then one sender after the other
        own = [part for part in incoming if part.name.sender == mine]
        copies = [SelfCopy(part.name.field, part.key, part.source_key) for part in own]
        others = (part for part in incoming if part.name.sender != mine)
        incoming = sorted(others, key=lambda part: part.name.sender)
    return RouteParts(
        outgoing,
        _staged((part.field, part.key, part.buffers) for part in outgoing),
        block_for_cache(copies, setup.mine),
        _by_sender(incoming, staging),
        _in_place(setup, sends, is_reverse=is_reverse),
    )


def _sent(sends: Sequence[Message], sender: int) -> Iterator[tuple[PartKey, Part]]:
    for message in sends:
        for part in message.parts:
            yield PartKey(sender, message.peer, message.tag, part.field), part


def _received(recvs: Sequence[Message], receiver: int) -> Iterator[tuple[PartKey, Part]]:
    for message in recvs:
        for part in message.parts:
            yield PartKey(message.peer, receiver, message.tag, part.field), part


def _by_sender(incoming: Sequence[Incoming], staging: DoubleBuffer) -> list[Sender]:
    senders = []
    for rank, found in groupby(incoming, key=lambda part: part.name.sender):
        parts = list(found)
        staged = _staged((part.name.field, part.key, part.buffers) for part in parts)
        senders.append(Sender(rank, staging.control[rank], parts, staged))
    return senders


def _staged(parts: Iterable[tuple[int, Any, Buffers]]) -> tuple[list[Staged], list[Staged]]:
    found = [(field, key, buffers) for field, key, buffers in parts if buffers is not None]
    even, odd = (
        [Staged(field, key, buffers[parity]) for field, key, buffers in found] for parity in (0, 1)
    )
    return even, odd


def _source_keys(
    setup: PlanSetup, sends: Sequence[Message], *, is_reverse: bool
) -> dict[PartKey, Any]:
    """Return what indexes the parts that this rank receives in the fields of their senders."""
    mine, messages = setup.comm.rank, setup.messages_by_rank(is_reverse=is_reverse)
    keys: dict[PartKey, Any] = {
        key: part.box and part.box.slices()
        for key, part, _ in parts_sent(messages, setup.comm.ranks_here)
        if key.receiver == mine
    }
    keys.update((key, part.key) for key, part in _sent(sends, mine) if key.receiver == mine)
    return keys


def _in_place(setup: PlanSetup, sends: Sequence[Message], *, is_reverse: bool) -> list[bool]:
    """Return per field whether its parts are boxes on all ranks, and large on this one."""
    in_place = [False] * len(setup.mine)
    if is_reverse:  # the cells that were sent are zeroed at once
        return in_place
    for key, part in _sent(sends, setup.comm.rank):
        if key.receiver != key.sender and part.nbytes >= _MIN_IN_PLACE_NBYTES:
            in_place[key.field] = True
    for key, info, _ in parts_sent(setup.sends, setup.comm.ranks_here):
        if info.box is None:
            in_place[key.field] = False
    return in_place

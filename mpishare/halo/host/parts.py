"""What a rank packs, copies and receives by route ``host``: computed once per plan.

Each part goes one of three ways. Its owner packs it into staging, and the receiver copies it from
there; or the receiver reads it where it is, in place in a window, or from the sender's process. The
last two need one copy instead of two, but the sender waits for its readers, and what is brought
from another core is cache lines of 64 bytes: of cells that lie apart, packing brings only the
bytes. Which way it is follows from the part's place in the sender's field, alike at both ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from mpishare.halo.host.copies import SelfCopy, block_for_cache
from mpishare.plans.message import PartKey, parts_sent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from mpishare.halo.host.copies import Array
    from mpishare.halo.host.staging import DoubleBuffer
    from mpishare.plans.cells import Box
    from mpishare.plans.engine import RoutedSetup
    from mpishare.plans.layout import FieldLayout
    from mpishare.plans.message import Message, Part, PartInfo

    Buffers = tuple[Array, Array] | None
    """The packed cells in even and in odd epochs; None if they are read from the process."""

# Measured with the compiled part on 32 cores, two faces whose cells were rewritten before, as
# programs do, in microseconds. Contiguous ones, packed, in place, from the process: 16 KiB 11.5,
# 9.9, 17 (8 ranks); 256 KiB 122, 99, 143 (32 ranks: 255, 188, 221); 1 MiB 573, 410, 491 (2209,
# 1307, 1394). 64 KiB in runs, packed and in place, by a bare loop: of 64 B 25, 49; of 256 B 28, 40
# (on two cores with one cache 18, 6); of 1 KiB 27, 25; of 4 KiB 25, 14.
_MIN_IN_PLACE_NBYTES = 16 << 10
"""Of a part that is read in place; below, packing costs less than waiting for all readers."""
_MIN_RUN_NBYTES = 256
"""Of cells that lie together; below, packing costs less than fetching line after line."""
_MIN_READ_NBYTES = 256 << 10
"""Of a part that is read from a process; below, two copies cost less than system call and wait."""
_MAX_SPREAD = 1.25
"""From the first cell to the end of the last, over the bytes of the cells, of what is read so."""


class Extent(NamedTuple):
    """Bytes of a field, from its start."""

    offset: int
    nbytes: int


def extent_of(layout: FieldLayout, box: Box) -> Extent:
    """Return the bytes of a field from the first cell of a box to the end of the last."""
    steps = layout.strides
    first = sum(at * step for at, step in zip(box.start, steps, strict=True))
    last = sum((end - 1) * step for end, step in zip(box.stop, steps, strict=True))
    return Extent(first, last - first + layout.dtype.itemsize)


def run_nbytes(layout: FieldLayout, box: Box) -> int:
    """Return how many bytes of a box lie together in a field, with no gaps between them."""
    nbytes = layout.dtype.itemsize
    for step, cells in sorted(zip(layout.strides, box.shape, strict=True)):
        if cells > 1:
            if step != nbytes:
                break
            nbytes *= cells
    return nbytes


def is_read_from_process(layout: FieldLayout, part: PartInfo | Part) -> bool:
    """Whether a part is worth reading from the sender's process, in whose field it is so placed."""
    if part.box is None or part.nbytes < _MIN_READ_NBYTES:
        return False
    return extent_of(layout, part.box).nbytes <= _MAX_SPREAD * part.nbytes


def is_read_in_place(layout: FieldLayout, part: PartInfo | Part) -> bool:
    """Whether a part is read in place where the sender's field is in a window."""
    if is_read_from_process(layout, part):
        return True
    if part.box is None or part.nbytes < _MIN_IN_PLACE_NBYTES:
        return False
    return run_nbytes(layout, part.box) >= _MIN_RUN_NBYTES


class Outgoing(NamedTuple):
    """A part that this rank sends to another one.

    `in_place`: read where it is if the field is in a window; else it is packed from there too.
    """

    field: int
    key: Any
    buffers: Buffers
    in_place: bool


class Incoming(NamedTuple):
    """A part that this rank receives: `key` indexes it here, `source_key` in the sender's field.

    `source_key` is None if the part is not a box: then only the sender knows its indices.
    `in_place`: as that of the sender's `Outgoing`.
    """

    name: PartKey
    key: Any
    source_key: Any
    in_place: bool
    buffers: Buffers


class Staged(NamedTuple):
    """A part and its buffer, to copy one into the other for whatever field a call names."""

    field: int
    key: Any
    buffer: Array


@dataclass(frozen=True, eq=False, slots=True)
class Sender:
    """Consecutive parts from one rank: its rank in the plan, its control words, the parts.

    `staged` are the parts with buffers, in even and in odd epochs; `read`, those with none.
    """

    rank: int
    control: memoryview[int]
    parts: list[Incoming]
    staged: tuple[list[Staged], list[Staged]]
    read: list[Incoming]


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
        Per field, whether other ranks read parts of it in place if it is in a window.
    readers : list of int
        Ranks that read parts in place or from this process, if the fields lie so.
    """

    outgoing: list[Outgoing]
    staged: tuple[list[Staged], list[Staged]]
    self_copies: list[SelfCopy]
    senders: list[Sender]
    in_place: list[bool]
    readers: list[int]


def lay_out(
    setup: RoutedSetup,
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
    outgoing, in_place, readers = [], [False] * len(setup.mine), set()
    for key, part in _sent(sends, mine):
        if key.receiver != mine:
            buffers = staging.buffers(key, part.shape)
            # In the reverse exchange the cells that were sent are zeroed at once.
            is_read = not is_reverse and is_read_in_place(setup.mine[key.field], part)
            outgoing.append(Outgoing(part.field, part.key, buffers, is_read))
            in_place[part.field] |= is_read
            if is_read:
                readers.add(key.receiver)
    sources = _sources(setup, sends, is_reverse=is_reverse)
    incoming = [
        Incoming(key, part.key, *sources[key], staging.buffers(key, part.shape))
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
        in_place,
        sorted(readers),
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
        read = [part for part in parts if part.buffers is None]
        senders.append(Sender(rank, staging.control[rank], parts, staged, read))
    return senders


def _staged(parts: Iterable[tuple[int, Any, Buffers]]) -> tuple[list[Staged], list[Staged]]:
    found = [(field, key, buffers) for field, key, buffers in parts if buffers is not None]
    even, odd = (
        [Staged(field, key, buffers[parity]) for field, key, buffers in found] for parity in (0, 1)
    )
    return even, odd


def _sources(
    setup: RoutedSetup, sends: Sequence[Message], *, is_reverse: bool
) -> dict[PartKey, tuple[Any, bool]]:
    """Return for the parts that this rank receives their keys in the fields of their senders.

    And whether they are read in place where these are in windows.
    """
    mine, messages = setup.comm.rank, setup.messages_by_rank(is_reverse=is_reverse)
    found: dict[PartKey, tuple[Any, bool]] = {}
    for key, part, _ in parts_sent(messages, setup.comm.ranks_here):
        if key.receiver == mine:
            layout = setup.layouts[key.sender][key.field]
            is_read = not is_reverse and is_read_in_place(layout, part)
            found[key] = part.box and part.box.slices(), is_read
    for key, own in _sent(sends, mine):
        if key.receiver == mine:
            found[key] = own.key, False
    return found

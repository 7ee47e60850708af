"""Messages between two ranks: cells of some fields, with a tag for each direction."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from mpishare.halo.geometry import Box

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy as np

    from mpishare.halo.layout import FieldLayout

ALIGN = 16
"""Every part of a message begins at a multiple of this: the widest word that a GPU stores."""


@dataclass(frozen=True, eq=False)
class Part:
    """The cells of one field that go with one message.

    Attributes
    ----------
    field : int
        Which of the plan's fields.
    shape : tuple of int
        Of the cells, in the order in which they travel: the last axis fastest.
    nbytes : int, bytes
        Of the cells alone.
    box : Box or None
        Where they are, if they are a box.
    axis : int
        Else: along this axis at `indices`, all of the others.
    indices : numpy.ndarray or None
        Places along `axis`, in the order in which they travel.
    """

    field: int
    shape: tuple[int, ...]
    nbytes: int
    box: Box | None = None
    axis: int = 0
    indices: np.ndarray[Any, Any] | None = None

    @classmethod
    def of_box(cls, field: int, layout: FieldLayout, box: Box) -> Part:
        """Return the cells of a box, given in the axes of the field."""
        return cls(field, box.shape, box.size * layout.dtype.itemsize, box)

    @classmethod
    def of_indices(cls, field: int, layout: FieldLayout, axis: int, indices: Any) -> Part:
        """Return the cells at `indices` along `axis`."""
        shape = list(layout.shape)
        shape[axis] = len(indices)
        nbytes = prod(shape) * layout.dtype.itemsize
        return cls(field, tuple(shape), nbytes, None, axis, indices)

    def piece(self, layout: FieldLayout, number: int, count: int) -> Part:
        """Return one of so many pieces; it may have no cells.

        Cut along the longest axis, or that of the indices: both ends cut alike.
        """
        axis = self.axis if self.box is None else self.shape.index(max(self.shape))
        begin, end = (_cut(self.shape[axis], at, count) for at in (number, number + 1))
        if self.indices is not None:
            return Part.of_indices(self.field, layout, axis, self.indices[begin:end])
        box = self.box or Box((), ())
        first = box.start[axis]
        start = (*box.start[:axis], first + begin, *box.start[axis + 1 :])
        stop = (*box.stop[:axis], first + end, *box.stop[axis + 1 :])
        return Part.of_box(self.field, layout, Box(start, stop))

    @property
    def key(self) -> Any:
        """What indexes the cells in an array of the field."""
        if self.box is not None:
            return self.box.slices()
        return (*[slice(None)] * self.axis, self.indices)


@dataclass(frozen=True)
class Message:
    """The cells that go from one rank to another in one direction at an exchange.

    Attributes
    ----------
    peer : int
        The other rank, in the plan's communicator.
    tag : int
        Distinguishes the messages between two ranks; the same at both ends.
    parts : tuple of Part
        At most one per field, in the order of the fields.
    """

    peer: int
    tag: int
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        """Its bytes when packed: each part begins at a multiple of `ALIGN`."""
        return sum(map(padded, (part.nbytes for part in self.parts)))

    def offsets(self) -> list[int]:
        """Return where each part begins in the packed message."""
        found, at = [], 0
        for part in self.parts:
            found.append(at)
            at += padded(part.nbytes)
        return found

    def piece(self, layouts: Sequence[FieldLayout], number: int, count: int) -> Message:
        """Return one of so many pieces of the message; it may have no parts."""
        parts = (part.piece(layouts[part.field], number, count) for part in self.parts)
        return replace(self, parts=tuple(part for part in parts if part.nbytes))

    def offset_of(self, part: Part) -> int:
        """Return where a part begins in the packed message."""
        return self.offsets()[self.parts.index(part)]


class PartInfo(NamedTuple):
    """What other ranks know of a part: its field, its size, and its box where it is one."""

    field: int
    nbytes: int
    box: Box | None


class MessageInfo(NamedTuple):
    """What other ranks know of a message: its peer, its tag, its parts and its route."""

    peer: int
    tag: int
    parts: tuple[PartInfo, ...]
    route: str


def pack_messages(messages: Sequence[Message], routes: Mapping[int, str]) -> list[Any]:
    """Return what other ranks need to know of messages, as JSON can hold it.

    Fields of one shape, of which there are many, have the same cells: these are written once.
    """
    packed = []
    for message in messages:
        runs: list[Any] = []
        for part in message.parts:
            cells = part.nbytes, part.box
            if runs and runs[-1][0] == cells:
                runs[-1][1].append(part.field)
            else:
                runs.append((cells, [part.field]))
        parts = [[n, box and [box.start, box.stop], fields] for (n, box), fields in runs]
        packed.append([message.peer, message.tag, parts, routes[message.peer]])
    return packed


def unpack_messages(packed: Sequence[Any]) -> list[MessageInfo]:
    """Return the messages that another rank has packed."""
    found = []
    for peer, tag, runs, route in packed:
        parts: list[PartInfo] = []
        for nbytes, ends, fields in runs:
            box = ends and Box(tuple(ends[0]), tuple(ends[1]))
            parts += [PartInfo(field, nbytes, box) for field in fields]
        found.append(MessageInfo(peer, tag, tuple(parts), route))
    return found


class PartKey(NamedTuple):
    """What names a part at both of its ends."""

    sender: int
    receiver: int
    tag: int
    field: int


def parts_sent(
    messages: Sequence[Sequence[MessageInfo]], senders: Iterable[int], route: str | None = None
) -> Iterator[tuple[PartKey, PartInfo, str]]:
    """Yield every part that these ranks send: what names it, what is known of it, its route.

    Parameters
    ----------
    messages : sequence of sequence of MessageInfo
        For each rank of the plan, what it sends.
    senders : iterable of int
        Ranks of the plan.
    route : str, optional
        Only the parts that take this one.
    """
    for sender in senders:
        for message in messages[sender]:
            if route in (None, message.route):
                for part in message.parts:
                    key = PartKey(sender, message.peer, message.tag, part.field)
                    yield key, part, message.route


def _cut(extent: int, number: int, count: int) -> int:
    """Return where a piece begins: pieces of contiguous cells stay aligned."""
    return extent if number == count else extent * number // count // ALIGN * ALIGN


def padded(nbytes: int) -> int:
    """Return the room that so many bytes take in a message."""
    return -(-nbytes // ALIGN) * ALIGN

"""Messages between two ranks: cells of some fields, with a tag for each direction."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpishare.plans.cells import Box, Cells

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence

    from mpishare.plans.layout import FieldLayout
    from mpishare.runtime.route import Route

# Every part of a message begins at a multiple of this: the widest word that a GPU stores.
ALIGN = 16


class Part(NamedTuple):
    """The cells of one field in one message: a box, or all cells at some places along an axis."""

    field: int  # index among the plan's fields
    shape: tuple[int, ...]  # of the cells, in the order in which they travel: last axis fastest
    nbytes: int  # without padding
    key: tuple[Any, ...]  # their index in an array of the field, with an item for each axis
    box: Box | None = None
    axis: int | None = None  # whose places were named: at the other end they may be no box
    far: int | None = None  # index of the field at the other end, where it is another one

    @classmethod
    def of_box(cls, field: int, layout: FieldLayout, box: Box, far: int | None = None) -> Part:
        """Return the part of a box in the axes of the field."""
        shape = box.shape
        return cls(field, shape, prod(shape) * layout.dtype.itemsize, box.slices, box, far=far)

    @classmethod
    def of_indices(cls, field: int, layout: FieldLayout, axis: int, indices: Any) -> Part:
        """Return the part of all cells at some places along an axis: ints, or a slice upwards."""
        extent = layout.shape[axis]
        places = indices if isinstance(indices, slice) else _slice_of(indices)
        shape = [*layout.shape]
        shape[axis] = len(indices if places is None else range(extent)[places])
        nbytes = prod(shape) * layout.dtype.itemsize
        key: list[Any] = [slice(0, n) for n in layout.shape]
        key[axis] = indices if places is None else places
        box = None
        if places is not None and places.step == 1:
            box = Box((0,) * len(shape), layout.shape).within(axis, places.start, places.stop)
        return cls(field, tuple(shape), nbytes, tuple(key), box, axis)

    def of_field(self, field: int) -> Part:
        """Return the same cells of another field, which has the layout of this one."""
        return Part(field, *self[1:])

    @property
    def far_field(self) -> int:
        """The field's index at the other end of the message."""
        return self.field if self.far is None else self.far

    @property
    def indices(self) -> np.ndarray[Any, Any] | None:
        """The places in the order in which they travel; None if a slice has them."""
        places = None if self.axis is None else self.key[self.axis]
        return None if isinstance(places, slice) else places

    def cells(self, layout: FieldLayout) -> Cells:
        """Return where the cells lie in a field: those at indices without their places."""
        key = self.key if self.indices is None else ()
        return Cells.of_key(layout, key)._replace(shape=self.shape)


class Message(NamedTuple):
    """The cells that go from one rank to another in one direction of an exchange."""

    peer: int  # rank in the plan's communicator
    tag: int  # the same at both ends; distinguishes the messages between two ranks
    parts: tuple[Part, ...]  # with cells; at most one per field, in the order of the fields

    @classmethod
    def of(cls, peer: int, tag: int, parts: Iterable[Part]) -> Message:
        """Return the message of those parts that have cells."""
        return cls(peer, tag, tuple(part for part in parts if part.nbytes))

    @property
    def nbytes(self) -> int:
        """Bytes when packed: each part begins at a multiple of `ALIGN`."""
        return sum(map(padded, (part.nbytes for part in self.parts)))

    def offsets(self) -> list[int]:
        """Return the offset of each part in the packed message, in bytes."""
        found, at = [], 0
        for part in self.parts:
            found.append(at)
            at += padded(part.nbytes)
        return found


class PartInfo(NamedTuple):
    """The description of a part for other ranks; `box` is None for indices."""

    field: int
    nbytes: int
    box: Box | None


class MessageInfo(NamedTuple):
    """The description of a message for other ranks."""

    peer: int
    tag: int
    parts: tuple[PartInfo, ...]
    route: Route


def pack_messages(messages: Sequence[Message]) -> list[Any]:
    """Return descriptions of messages for JSON.

    Fields of one shape, of which there are often many, have the same cells: these are written once.
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
        parts = [[n, box and box.pack(), fields] for (n, box), fields in runs]
        packed.append([message.peer, message.tag, parts])
    return packed


def unpack_messages(packed: Sequence[Any], routes: Mapping[int, Route]) -> list[MessageInfo]:
    """Return the descriptions that `pack_messages` made on a rank, with its routes to its peers."""
    found = []
    for peer, tag, runs in packed:
        parts: list[PartInfo] = []
        for nbytes, cells, fields in runs:
            box = cells and Box.unpack(cells)
            parts += [PartInfo(field, nbytes, box) for field in fields]
        found.append(MessageInfo(peer, tag, tuple(parts), routes[peer]))
    return found


class PartKey(NamedTuple):
    """The identity of a part, the same at both of its ends."""

    sender: int
    receiver: int
    tag: int
    field: int  # of the sender


def cells_of(key: PartKey, part: Part | PartInfo) -> Hashable:
    """Return what equals that of another part of the same cells; indices equal no others."""
    return key if part.box is None else (key.sender, key.field, part.box)


def sent(messages: Iterable[Message], sender: int) -> Iterator[tuple[PartKey, Part]]:
    """Yield the parts of messages that this rank, `sender`, sends."""
    for message in messages:
        for part in message.parts:
            yield PartKey(sender, message.peer, message.tag, part.field), part


def received(messages: Iterable[Message], receiver: int) -> Iterator[tuple[PartKey, Part]]:
    """Yield the parts of messages that this rank, `receiver`, receives."""
    for message in messages:
        for part in message.parts:
            yield PartKey(message.peer, receiver, message.tag, part.far_field), part


def parts_sent(
    messages: Sequence[Sequence[MessageInfo]],
    senders: Iterable[int],
    route: Route,
    receivers: Container[int] | None = None,
) -> Iterator[tuple[PartKey, PartInfo]]:
    """Yield key and description of each part that `senders` send by a route; default: to all."""
    for sender in senders:
        for message in messages[sender]:
            if message.route == route and (receivers is None or message.peer in receivers):
                for part in message.parts:
                    yield PartKey(sender, message.peer, message.tag, part.field), part


def parts_of_fields(
    layouts: Sequence[FieldLayout], make: Callable[[FieldLayout], Part]
) -> Iterator[Part]:
    """Yield the parts of all fields, made once for each layout: its fields have the same cells."""
    made = {layout: make(layout) for layout in dict.fromkeys(layouts)}
    for field, layout in enumerate(layouts):
        yield made[layout].of_field(field)


def _slice_of(indices: np.ndarray[Any, Any]) -> slice | None:
    """Return indices at equal steps upwards as a slice; None for others."""
    first, last = (int(indices[0]), int(indices[-1])) if len(indices) else (0, -1)
    step = int(indices[1]) - first if len(indices) > 1 else 1
    is_equal = step > 0 and bool((np.diff(indices) == step).all())
    return slice(first, last + 1, step) if is_equal else None


def padded(nbytes: int, align: int = ALIGN) -> int:
    """Return the next multiple of an alignment; default: of the parts of a packed message."""
    return -(-nbytes // align) * align

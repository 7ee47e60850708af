"""Messages between two ranks: cells of some fields, with a tag for each direction."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpishare.errors import grouped
from mpishare.plans.cells import Box, Cells, Turn

if TYPE_CHECKING:
    from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence

    from mpishare.plans.layout import FieldLayout
    from mpishare.plans.rings import Slide
    from mpishare.runtime.route import Route

# Every part of a message begins at a multiple of this: the widest word that a GPU stores.
ALIGN = 16


class Factors(NamedTuple):
    """What the cells that arrive are multiplied by and what is added, each rounded; None: not."""

    scale: np.ndarray[Any, Any] | None  # a number of the field's dtype, without axes
    offset: np.ndarray[Any, Any] | None

    def of(self, cells: Any) -> Any:
        if self.scale is not None:
            cells = _products(cells, self.scale)
        return cells if self.offset is None else cells + self.offset

    def pack(self) -> tuple[bytes | None, bytes | None]:
        scale, offset = (each if each is None else each.tobytes() for each in self)
        return scale, offset


def _products(cells: Any, scale: Any) -> Any:
    """Return the products with a factor: of complex ones by parts, since NumPy may contract them.

    A real factor is one of both parts, so that infinite ones stay what they are.
    """
    if scale.dtype.kind != "c":
        return cells * scale
    found = np.empty_like(cells)
    found.real, found.imag = cells.real * scale.real, cells.imag * scale.real
    if scale.imag:
        found.real -= cells.imag * scale.imag
        found.imag += cells.real * scale.imag
    return found


class Part(NamedTuple):
    """The cells of one field in one message: a box, or all cells at some places along an axis.

    It travels as its sender has it, unless it goes back.
    """

    field: int  # index among the plan's fields
    shape: tuple[int, ...]  # of the cells, in the order in which they travel: last axis fastest
    nbytes: int  # without padding
    key: tuple[Any, ...]  # their index in an array of the field, with an item for each axis
    box: Box | None = None
    axis: int | None = None  # whose places were named: at the other end they may be no box
    far: int | None = None  # index of the field at the other end, where it is another one
    turn: Turn | None = None  # of this end's axes
    far_turn: Turn | None = None  # of the other end's
    factors: Factors | None = None  # of the cells that arrive at this end
    slide: Slide | None = None  # of a box that is cut at each call, along an axis that travels

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

    @property
    def is_plain(self) -> bool:
        """Whether what arrives is what was sent, in the same order; the same at both ends."""
        return not (self.turn or self.far_turn or self.factors or self.slide)

    @property
    def along(self) -> int:
        """The axis that travels along which the cells have any places; -1 if none has."""
        if self.slide is not None:
            return self.slide.axis
        return -1 if self.axis is None or self.indices is None else self.axis

    def seen(self, layout: FieldLayout, *, is_far: bool = False) -> FieldLayout:
        """Return the layout of a field with the axes that travel: of this end, or of the other."""
        turn = self.far_turn if is_far else self.turn
        if turn is None:
            return layout
        whole = Cells(0, layout.shape, layout.strides, {}).turned(turn)
        return replace(layout, shape=whole.shape, strides=whole.strides)

    def cells(self, layout: FieldLayout) -> Cells:
        """Return where the cells lie in a field, as they travel: at indices without their places.

        A box that slides begins where it does if nothing is cut from it.
        """
        key = self.key if self.indices is None else ()
        return Cells.of_key(layout, key).turned(self.turn)._replace(shape=self.shape)

    def place(self, array: Any, shifts: Sequence[int]) -> tuple[Any, Any]:
        """Return an array on a field of NumPy, and the index there of what travels, in order."""
        if self.is_plain:
            return array, self.key
        turned = array[self.key] if self.turn is None else self.turn.view(array[self.key])
        whole = (slice(None),) * turned.ndim
        return turned, whole if self.slide is None else self.slide.cut(shifts)


class Message(NamedTuple):
    """The cells that go from one rank to another in one direction of an exchange."""

    peer: int  # rank in the plan's communicator
    tag: int  # the same at both ends; distinguishes the messages between two ranks
    parts: tuple[Part, ...]  # with cells, in the same order at both ends

    @property
    def nbytes(self) -> int:
        """Bytes when packed: each part begins at a multiple of `ALIGN`."""
        return sum(map(padded, (part.nbytes for part in self.parts)))

    def offsets(self) -> list[int]:
        return [*accumulate((padded(part.nbytes) for part in self.parts[:-1]), initial=0)]

    def is_contiguous(self, layouts: Sequence[FieldLayout]) -> bool:
        """Whether the cells follow each other in one field, in the order of travel."""
        part = self.parts[0]
        if len(self.parts) > 1 or part.box is None or part.factors is not None:
            return False
        layout = layouts[part.field]
        cells, step = part.cells(layout), layout.dtype.itemsize
        for extent, stride in zip(reversed(cells.shape), reversed(cells.strides), strict=True):
            if extent != 1:
                if stride != step:
                    return False
                step *= extent
        return True


def gather_messages(parts: Iterable[tuple[int, int, Part]]) -> list[Message]:
    """Return a message for each tag and peer, in their order, of parts given with both.

    Only parts with cells make one: both ends have the same.
    """
    found = grouped(((tag, peer), part) for tag, peer, part in parts if part.nbytes)
    return [Message(peer, tag, tuple(found[tag, peer])) for tag, peer in sorted(found)]


class PartInfo(NamedTuple):
    """The description of a part for other ranks; `box` is None for indices."""

    field: int
    nbytes: int
    box: Box | None
    is_plain: bool = True
    far: int | None = None  # as that of a `Part`


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
            cells = part.nbytes, part.box, part.is_plain, part.far
            if runs and runs[-1][0] == cells:
                runs[-1][1].append(part.field)
            else:
                runs.append((cells, [part.field]))
        parts = [[n, box and box.pack(), *rest, fields] for (n, box, *rest), fields in runs]
        packed.append([message.peer, message.tag, parts])
    return packed


def unpack_messages(packed: Sequence[Any], routes: Mapping[int, Route]) -> list[MessageInfo]:
    """Return the descriptions that `pack_messages` made on a rank, with its routes to its peers."""
    found = []
    for peer, tag, runs in packed:
        parts: list[PartInfo] = []
        for nbytes, cells, is_plain, far, fields in runs:
            box = cells and Box.unpack(cells)
            parts += [PartInfo(field, nbytes, box, is_plain, far) for field in fields]
        found.append(MessageInfo(peer, tag, tuple(parts), routes[peer]))
    return found


class PartKey(NamedTuple):
    sender: int
    receiver: int
    tag: int
    field: int  # of the sender
    number: int  # among the parts of the message


def cells_of(key: PartKey, part: Part | PartInfo) -> Hashable:
    """Return what equals that of another part of the same cells; indices equal no others."""
    return key if part.box is None else (key.sender, key.field, part.box)


def sent(messages: Iterable[Any], sender: int) -> Iterator[tuple[PartKey, Any]]:
    """Yield the parts of messages that `sender` sends, or of their descriptions."""
    for message in messages:
        for number, part in enumerate(message.parts):
            yield PartKey(sender, message.peer, message.tag, part.field, number), part


def received(messages: Iterable[Message], receiver: int) -> Iterator[tuple[PartKey, Part]]:
    """Yield the parts of messages that this rank, `receiver`, receives."""
    for message in messages:
        for number, part in enumerate(message.parts):
            yield PartKey(message.peer, receiver, message.tag, part.far_field, number), part


def parts_sent(
    messages: Sequence[Sequence[MessageInfo]],
    senders: Iterable[int],
    route: Route,
    receivers: Container[int] | None = None,
) -> Iterator[tuple[PartKey, PartInfo]]:
    """Yield key and description of each part that `senders` send by a route; default: to all."""
    for sender in senders:
        of_route = (message for message in messages[sender] if message.route == route)
        yield from sent((m for m in of_route if receivers is None or m.peer in receivers), sender)


def _slice_of(indices: np.ndarray[Any, Any]) -> slice | None:
    """Return indices at equal steps upwards as a slice; None for others."""
    first, last = (int(indices[0]), int(indices[-1])) if len(indices) else (0, -1)
    step = int(indices[1]) - first if len(indices) > 1 else 1
    is_equal = step > 0 and bool((np.diff(indices) == step).all())
    return slice(first, last + 1, step) if is_equal else None


def are_sent_once(messages: Iterable[Message], layouts: Sequence[FieldLayout]) -> bool:
    """Whether no cell is sent twice: to two ranks, or two times to one."""
    is_sent = [np.zeros(each.shape, bool) for each in layouts]
    for part in (part for message in messages for part in message.parts):
        known, indices = is_sent[part.field], part.indices
        repeats = indices is not None and len(np.unique(indices)) < len(indices)
        if repeats or known[part.key].any():
            return False
        known[part.key] = True
    return True


def padded(nbytes: int, align: int = ALIGN) -> int:
    """Return the next multiple of an alignment; default: of the parts of a packed message."""
    return -(-nbytes // align) * align

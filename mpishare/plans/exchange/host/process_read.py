"""Zero-copy reads from a peer process with ``process_vm_readv`` (cross-memory attach, CMA).

Where Linux allows it (the same user, and neither Yama nor a container forbids it), a large face of
a field that is in no window is copied once instead of twice, and takes no shared memory. The second
copy costs more than its bytes: each cache line goes from core to core twice, which takes 23 ns each
time, against 3 ns for a line that no other core holds.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpishare.memory.memory import address_of
from mpishare.memory.process_memory import ReadTrial
from mpishare.plans.cells import Cells, cut_item, lower
from mpishare.plans.exchange.host.parts import (
    Extent,
    extent_of,
    has_few_gaps,
    is_read_from_process,
)
from mpishare.plans.message import cells_of, parts_sent, received
from mpishare.plans.peer_memory import PeerProcesses
from mpishare.runtime.route import HOST

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mpishare.plans.cells import Box
    from mpishare.plans.engine import RoutedSetup
    from mpishare.plans.exchange.host.route import Array
    from mpishare.plans.layout import FieldLayout
    from mpishare.plans.message import Message, MessageInfo, PartInfo, PartKey

_BLOCK_NBYTES = 256 << 10  # read at once, then copied on while it is in the cache
_MAX_READERS, _MAX_PACKED_NBYTES = 4, 4 << 20
"""The most ranks that read the same cells at a time, and the most bytes that are packed for more.

27 that read 1.6 MB of one rank took 3.0 ms, three times as long as MPI; fewer were not timed.
"""

log = logging.getLogger("mpishare.halo")


def _are_read(
    sent: Sequence[tuple[PartKey, PartInfo]], layouts: Sequence[Sequence[FieldLayout]]
) -> Iterator[tuple[PartKey, Box]]:
    """Yield the parts between ranks that are worth reading from the sender's process.

    Cells that too many ranks would read at a time are packed; each begins at another sender. So are
    those whose axes the receiver has in another order: a permuted transpose of 128^3 complex
    numbers took 0.7 of the time in which they were read, one of 200^3 took 0.9.
    """
    cells = [cells_of(*each) for each in sent]
    readers, nbytes_packed = Counter(cells), Counter[int]()
    most = _MAX_READERS * len({key.sender for key, _ in sent})
    for key, part in dict(zip(cells, sent, strict=True)).values():
        nbytes_packed[key.sender] += part.nbytes
    for (key, part), same in zip(sent, cells, strict=True):
        is_crowded = part.nbytes <= _MAX_PACKED_NBYTES and readers[same] > most
        layout = layouts[key.sender][key.field]
        there = layouts[key.receiver][key.field if part.far is None else part.far]
        if (
            part.box is not None
            and is_read_from_process(layout, part, nbytes_packed[key.sender])
            and not is_crowded
            and _order(layout, part.box) == _order(there, part.box)
        ):
            yield key, part.box


def _order(layout: FieldLayout, box: Box) -> list[int]:
    """Return the axes along which a box has several cells, the fastest in memory first."""
    axes = (axis for axis, extent in enumerate(box.shape) if extent > 1)
    return sorted(axes, key=layout.strides.__getitem__)


class _Block(NamedTuple):
    """Cells that are read by one system call, and copied on."""

    extent: Extent  # of the sender's field
    key: tuple[Any, ...]  # in the receiver's field
    strides: tuple[int, ...] | None  # of the cells as read; None if the receiver's field has them


class PeerReads:
    """The parts of a plan that the receiver reads from the sender's process.

    `messages` are those that each rank sends, none if nothing may be read. `keys` are the parts
    that are read within this node, the same on all its ranks, `fields` this rank's with such parts,
    `reads` how this rank reads each part, as tables of the compiled part.
    """

    def __init__(self, setup: RoutedSetup, messages: Sequence[Sequence[MessageInfo]]) -> None:
        self._comm = comm = setup.comm
        self._name = setup.name
        self._layouts = setup.layouts
        self.peers = PeerProcesses(setup)
        sent = parts_sent(messages, comm.ranks_here if messages else (), HOST)
        others = [(key, part) for key, part in sent if key.sender != key.receiver]
        self._boxes = dict(_are_read(others, self._layouts))
        self.keys = frozenset(self._boxes) - self._unreadable()
        self.fields = frozenset(key.field for key in self.keys if key.sender == comm.rank)
        self.reads: dict[PartKey, list[tuple[Any, ...]]] = {}
        self._scratch = np.empty(0, np.uint8)
        self._shadows: dict[int, Array] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer for cells that are rearranged after they are read."""
        return self._scratch.nbytes

    def lay_out(self, recvs: Sequence[Message]) -> None:
        """Cut the parts of these messages into blocks, and allocate the buffer."""
        mine, layouts = self._comm.rank, self._layouts
        blocks: dict[PartKey, tuple[int, list[_Block]]] = {}
        for key, part in received(recvs, mine):
            if key in self.keys:
                pair = layouts[key.sender][key.field], layouts[mine][part.field]
                blocks[key] = part.field, [*_blocks(*pair, self._boxes[key], part.key)]
        every = [block for _, found in blocks.values() for block in found]
        sizes = (block.extent.nbytes for block in every if block.strides is not None)
        self._scratch = np.empty(max(sizes, default=0), np.uint8)
        for key, (field, found) in blocks.items():
            self.reads[key] = [self._lower(field, block) for block in found]
        self._trials = {field: self._ends(field) for field in self.fields}

    def _ends(self, field: int) -> tuple[ReadTrial, np.ndarray[Any, Any]]:
        """Return a trial of what others read of a field, and where: a byte at either end of a part.

        An array lies in memory that was allocated at once, so that these stand for all.
        """
        mine = self._comm.rank
        boxes = [self._boxes[key] for key in self.keys if key[::3] == (mine, field)]
        extents = [extent_of(self._layouts[mine][field], box) for box in boxes]
        ends = [end for at, nbytes in extents for end in (at, at + nbytes - 1)]
        return ReadTrial(len(ends)), np.array(ends, np.uint64)

    def _lower(self, field: int, block: _Block) -> tuple[Any, ...]:
        """Return offset, bytes and target of a read, or its place in the buffer and the copy."""
        layout = self._layouts[self._comm.rank][field]
        target = Cells.of_key(layout, block.key)
        if block.strides is None:
            return *block.extent, target.offset, None, None
        cells = np.ndarray(target.shape, layout.carrier, self._scratch, strides=block.strides)
        copy = lower(target, Cells.of_array(cells), layout.dtype.itemsize, by=target)
        return *block.extent, 0, address_of(cells), copy

    def shadow(self, field: int, address: int) -> Array | None:
        """Return where to copy my field at this address for its readers; None if they can read it.

        They cannot read memory of a driver, such as CUDA's pinned memory. The parts are copied into
        an array like it; its other pages are never touched.
        """
        trial, ends = self._trials[field]
        if trial.at(ends, address):
            return None
        if field not in self._shadows:
            layout = self._layouts[self._comm.rank][field]
            self._shadows[field] = np.ndarray(
                layout.shape, layout.carrier, np.empty(layout.span_nbytes, np.uint8),
                strides=layout.strides,
            )  # fmt: skip
        return self._shadows[field]

    def close(self) -> None:
        self.reads, self._shadows, self._scratch = {}, {}, np.empty(0, np.uint8)

    def _unreadable(self) -> set[PartKey]:
        """Return the parts that the receiver could not read when the node was made."""
        found, senders = set(), {}
        for key in self._boxes:
            why = self.peers.unreadable.get((key.receiver, key.sender))
            if why is not None:
                found.add(key)
                if key.receiver == self._comm.rank:
                    senders[key.sender] = why
        for sender, why in senders.items():
            log.info(
                "%s: large faces of rank %d are copied twice, since its memory cannot be read: %s",
                self._name, sender, why,
            )  # fmt: skip
        return found


def _blocks(
    theirs: FieldLayout, mine: FieldLayout, source: Box, key: tuple[Any, ...]
) -> Iterator[_Block]:
    """Yield the reads of a box in the sender's field into cells of the same shape in mine."""
    extent = extent_of(theirs, source)
    steps, own = _steps(theirs, source.slices), _steps(mine, key)
    if steps == own and extent.nbytes == source.size * theirs.dtype.itemsize:
        yield _Block(extent, key, None)
        return
    axis = steps.index(max(steps))  # the slowest in the sender's memory
    if (extent.nbytes <= _BLOCK_NBYTES and has_few_gaps(theirs, source)) or max(steps) == 0:
        yield _Block(extent, key, Cells.of_key(theirs, source.slices).strides)
    else:
        planes = min(max(_BLOCK_NBYTES // steps[axis], 1), source.shape[axis] - 1)
        for first in range(0, source.shape[axis], planes):
            last = first + planes
            item = cut_item(key[axis], mine.shape[axis], first, last)
            some = source.cut(axis, first, last), (*key[:axis], item, *key[axis + 1 :])
            yield from _blocks(theirs, mine, *some)


def _steps(layout: FieldLayout, key: Sequence[Any]) -> list[int]:
    """Return the strides of the cells of a key: 0 along axes of one cell, -1 of any places."""
    _, shape, strides, places = Cells.of_key(layout, key)
    steps = [step if extent > 1 else 0 for extent, step in zip(shape, strides, strict=True)]
    return [-1 if axis in places else step for axis, step in enumerate(steps)]

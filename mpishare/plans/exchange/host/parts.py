"""What a rank packs, copies and receives within its node: computed once per plan.

Each part goes one of three ways. Its owner packs it into staging, and the receiver copies it from
there; or the receiver reads it where it is, in place in a window, or from the sender's process. The
last two need one copy instead of two, but the sender waits for its readers, and what is brought
from another core is cache lines of 64 bytes: of cells that lie apart, packing brings only the
bytes. Which way it is follows from the part's place in the sender's field, alike at both ends.
"""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from mpishare.memory.memory import span_nbytes
from mpishare.plans.cells import Cells, loops
from mpishare.plans.message import PartKey, cells_of, parts_sent, received, sent
from mpishare.runtime.route import HOST

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.plans.cells import Box
    from mpishare.plans.engine import RoutedSetup
    from mpishare.plans.exchange.host.route import Array
    from mpishare.plans.exchange.host.staging import Staging
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
"""The least size of a part read in place; below, packing costs less than waiting for readers."""
_MIN_RUN_NBYTES = 256
"""The least run of cells in one piece; below, packing costs less than fetching line by line."""
_MIN_READ_NBYTES = 256 << 10
"""The least size of a part read from a process; below, two copies cost less than the call."""
_MAX_SPREAD = 1.25
"""The largest ratio of span to bytes of cells that one call reads."""
_MIN_READ_RUN_NBYTES = 64 << 10
"""The least run of cells that is read by a call of its own: the call costs as much as 8 KiB."""
_MAX_CACHED_NBYTES, _UNCACHED_RATIO = 2 << 20, 4
"""Of more that a rank packs, the first cells leave its cache before they are read, and parts and
runs are read from the process that are smaller by this ratio: 28 ranks that sent 4.5 MB each in
parts of 160 kB took 1.6 ms in place of 3.3, but 8 ranks with 1.1 MB each 1.05 of the time.
"""
_MAX_READ_RUNS = 256
"""So many of them at most, since each takes some 0.3 ms when the plan is made."""


class Extent(NamedTuple):
    """Bytes of a field, from its start."""

    offset: int
    nbytes: int


def extent_of(layout: FieldLayout, box: Box) -> Extent:
    """Return the bytes of a field from the first cell of a box to the end of the last."""
    cells = Cells.of_key(layout, box.slices)
    return Extent(cells.offset, span_nbytes(cells.shape, cells.strides, layout.dtype.itemsize))


def run_nbytes(layout: FieldLayout, box: Box) -> int:
    """Return how many bytes of a box lie together in a field, with no gaps between them."""
    cells = Cells.of_key(layout, box.slices)
    return loops([cells], layout.dtype.itemsize, cells.by_stride())[0].extent


def has_few_gaps(layout: FieldLayout, box: Box) -> bool:
    """Whether a box is worth reading by one call, with what lies between its cells."""
    nbytes = box.size * layout.dtype.itemsize
    return extent_of(layout, box).nbytes <= _MAX_SPREAD * nbytes


def is_read_from_process(
    layout: FieldLayout, part: PartInfo | Part, nbytes_packed: int = 0
) -> bool:
    """Whether a part is worth reading from the sender's process, in whose field it is so placed.

    `nbytes_packed` counts what the sender would pack of all its parts.
    """
    ratio = _UNCACHED_RATIO if nbytes_packed > _MAX_CACHED_NBYTES else 1
    if part.box is None or not part.is_plain or ratio * part.nbytes < _MIN_READ_NBYTES:
        return False
    run = run_nbytes(layout, part.box)
    is_in_runs = ratio * run >= _MIN_READ_RUN_NBYTES and part.nbytes <= run * _MAX_READ_RUNS
    return is_in_runs or has_few_gaps(layout, part.box)


def is_read_in_place(layout: FieldLayout, part: PartInfo | Part) -> bool:
    """Whether a part is read in place where the sender's field is in a window."""
    if is_read_from_process(layout, part):
        return True
    if part.box is None or part.nbytes < _MIN_IN_PLACE_NBYTES:
        return False
    return run_nbytes(layout, part.box) >= _MIN_RUN_NBYTES


class RoutePart(NamedTuple):
    """A part that this rank sends or receives, which has the index `source_key` at its sender.

    `source_key` is None if another rank sends the part and it is not a box: then only that rank
    knows its indices. `in_place`: read where it is if the sender's field lies so; else it is packed
    from there too.
    """

    name: PartKey
    part: Part
    source_key: Any
    in_place: bool
    buffers: Buffers


class Sender(NamedTuple):
    """Consecutive parts from one rank of the plan, which may be this one."""

    rank: int
    parts: list[RoutePart]


class RouteParts(NamedTuple):
    """Everything that the calls of a plan have in common, whatever fields they name.

    `senders` are in the order in which their parts are stored, and `in_place` says of each field
    whether `readers` read parts of it where they are, if the field lies so.
    """

    outgoing: list[RoutePart]
    senders: list[Sender]
    in_place: list[bool]
    readers: list[int]


def lay_out(
    setup: RoutedSetup,
    sends: Sequence[Message],
    recvs: Sequence[Message],
    staging: Staging,
) -> RouteParts:
    """Find out where the cells of these messages come from and where they go.

    `sends` and `recvs` are what takes this route, the messages of this rank to itself included.
    """
    mine, made = setup.comm.rank, _part_maker(setup, sends, staging)
    incoming = [made(*each) for each in received(recvs, mine)]
    outgoing, fields_read, readers = {}, set(), set()
    for name, part in sent(sends, mine):
        if name.receiver != mine:
            found = made(name, part)
            # Two receivers of the same cells may differ.
            outgoing[cells_of(name, part), found.buffers is None] = found
            if found.in_place:
                fields_read.add(part.field)
                readers.add(name.receiver)
    if not setup.zeroes:
        # In any order: own cells, then those of the ranks behind this one, so that no two ranks
        # begin at the same sender.
        incoming.sort(key=lambda part: (part.name.sender < mine, part.name.sender))
    by_sender = groupby(incoming, key=attrgetter("name.sender"))
    return RouteParts(
        [*outgoing.values()],
        [Sender(rank, [*found]) for rank, found in by_sender],
        [field in fields_read for field in range(len(setup.mine))],
        sorted(readers),
    )


def _part_maker(
    setup: RoutedSetup, sends: Sequence[Message], staging: Staging
) -> Callable[[PartKey, Part], RoutePart]:
    infos = dict(parts_sent(setup.sends, setup.comm.ranks_here, HOST))
    own_keys = {name: part.key for name, part in sent(sends, setup.comm.rank)}

    def made(name: PartKey, part: Part) -> RoutePart:
        info, layout = infos[name], setup.layouts[name.sender][name.field]
        source_key = own_keys.get(name, info.box and info.box.slices)
        is_read = name in staging.unstaged or is_read_in_place(layout, info)
        in_place = not setup.adds and name.sender != name.receiver and is_read
        buffers = staging.buffers(name, part.shape)
        return RoutePart(name, part, source_key, in_place, buffers)

    return made

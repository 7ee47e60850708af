"""Work items: the unit of work of a kernel, a chunk of a part between two places."""

from __future__ import annotations

from contextlib import contextmanager
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpishare.errors import UnsupportedError
from mpishare.memory.numbers import ADDED, number_of
from mpishare.plans.cells import Box
from mpishare.plans.exchange.cuda.records import (
    ADD,
    FACTORS_RECORD,
    FIELD,
    GET_LL,
    GHOSTS_RECORD,
    ITEM,
    ITEM_RECORD,
    LOCAL,
    PACK,
    PART_RECORD,
    PUT_LL,
    PUT_LL_AND_ZERO,
    READY,
    SCALED,
    SOURCE_RECORD,
    SWAP_LL,
    UNPACK,
)
from mpishare.plans.exchange.cuda.strided import StridedCells
from mpishare.plans.exchange.cuda.tiles import End, chunks_of, travel_order
from mpishare.plans.layout import FieldLayout
from mpishare.plans.message import ALIGN, Part, padded
from mpishare.plans.wire import float_nbytes, wire_nbytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mpishare.plans.cells import Turn
    from mpishare.plans.rings import Slide

    Array = np.ndarray[Any, Any]

# (part bytes up to, chunk bytes): small parts take one pass of a block's threads; large ones take
# larger chunks, so that fetching an item costs little next to copying it.
_CHUNKS = ((128 << 10, 4 << 10), (4 << 20, 16 << 10), (32 << 20, 32 << 10), (1 << 62, 64 << 10))
# Ranks that share a GPU have few blocks each, which run many items one after the other.
_CHUNKS_OF_SHARED_GPU = (
    (128 << 10, 4 << 10),
    (512 << 10, 32 << 10),
    (4 << 20, 64 << 10),
    (32 << 20, 128 << 10),
    (1 << 62, 256 << 10),
)
# Of a part: 512 MiB between two H200 took 1,474 us by them, and 1,508 by a quarter as many.
_MAX_CHUNKS = 4096
# Chunks of a part that are packed before the first one is waited for: enough to fill the links.
_AHEAD = 64
# Of a rank's own part: cells of smaller ones stay in the cache, in whatever order they are stored.
_MIN_TILED_NBYTES = 64 << 10
# LL carries 4 bytes of data per 8-byte store; above this size plain stores and a flag are faster.
LL_UNIT, _LL_MAX_NBYTES = 8, 128 << 10
LL_CHUNK_NBYTES = 4096
"""Bytes for a block of fused_ll.cu: one pass of its threads."""

_BY_LL = (PUT_LL, PUT_LL_AND_ZERO, SWAP_LL, GET_LL, ADD)  # those that send first
_WAITING = (UNPACK, SWAP_LL, GET_LL, ADD)


@lru_cache(maxsize=64)
def chunks(nbytes: int, *, shares_gpu: bool) -> tuple[int, int]:
    """Return how many chunks a part has, one work item each, and their bytes. Same at both ends.

    `shares_gpu`: whether its sender or its receiver shares a GPU with other ranks.
    """
    sizes = _CHUNKS_OF_SHARED_GPU if shares_gpu else _CHUNKS
    step = next(step for largest, step in sizes if nbytes <= largest)
    step = padded(max(step, -(-nbytes // _MAX_CHUNKS)))
    return -(-nbytes // step), step


def uses_ll(nbytes: int) -> bool:
    """Whether a fused part travels by LL, with the flag in the data. Same at both ends."""
    return nbytes <= _LL_MAX_NBYTES


class Ghosts(NamedTuple):
    """The cells of a receiver that a sender on the same GPU may store into."""

    part: Part
    layout: FieldLayout
    address: int  # of the field, as this rank's GPU maps it
    ready: int  # address of the receiver's flag that they may be written

    def cells(self, unit: int) -> StridedCells:
        """Return the cells in units of that many bytes at most."""
        return StridedCells.of(self.part, self.layout, min(unit, self.address & -self.address))


class Slot(NamedTuple):
    """The packed place of a part: in a send, receive or staging buffer."""

    address: int  # for this rank's GPU; of the first of two buffers
    parity_offset: int = 0  # to the second, for odd epochs; 0 for a single buffer
    flags: Sequence[int] = ()  # one address for each chunk; empty if no kernel waits, or by LL
    ghosts: Ghosts | None = None  # the destination at exchanges at which the receiver allows it
    far: FieldLayout | None = None  # of the other end, where it may be in another order of axes
    stalled_on: int = 0  # address of the word that publishes this rank's wait for the other one
    shares_gpu: bool = False  # as `chunks` takes it


class Source(NamedTuple):
    """A part that has a number for each cell of a region."""

    part: Part  # the region's cells in it
    layout: FieldLayout  # of the packed part, or of the field that has this rank's own ghosts
    nbytes: int  # of the whole part
    slot: Slot  # at address 0 for this rank's own ghosts, which become zero


class Item(NamedTuple):
    """A work item, or all those of a part: the fields of `ITEM_RECORD`, then how they are cut."""

    part: bytes
    packed: int = 0
    parity_offset: int = 0
    flag: int = 0
    stalled_on: int = 0
    target: int = 0
    first: int = 0
    nunits: int = 0
    kind: int = 0
    element: int = 0
    log_rows: int = 0
    log_columns: int = 0
    next: int = 0
    more: int = 0

    flags: Sequence[int] = ()  # one for each chunk; empty for none
    begin: int = 0  # index of the first chunk
    chunks: int = 1
    step: int = 1 << 31  # units of each chunk but the last


class ItemArray(NamedTuple):
    address: int
    length: int
    options: tuple[str, ...] = ()  # of the compiler: what these items need


class WorkList:
    """Collects the work items of one launch; `upload` returns an array's address on the GPU.

    Only elements of `tiled` bytes are transposed, if it is given; `places_of` returns where a part
    that slides has its places.
    """

    def __init__(
        self,
        layouts: Sequence[FieldLayout],
        alignments: Sequence[int],
        upload: Callable[[Array], int],
        wire: str | None = None,
        tiled: int | None = None,
        places_of: Callable[[Slide, int], int] | None = None,
    ) -> None:
        self._layouts, self._wire = layouts, wire
        self._tiled_nbytes, self._places_of = tiled, places_of
        self._alignments = alignments
        self._upload = upload
        self._known: dict[tuple[FieldLayout, Box, Turn | None, int], StridedCells] = {}
        self._items: list[Item] = []
        self._followers: list[int] = []  # the items that the block of the one before runs, too
        self._options: set[str] = set()
        self._max_ll_chunks = 1
        self._has_flags = False  # of sources of regions
        self._adding = 0  # a bit for each type in which cells are added

    def __len__(self) -> int:
        """Return for how many items there may be a block."""
        chunks = sum(item.chunks for item in self._items)
        return chunks - sum(self._items[at].chunks for at in self._followers)

    def give_back(self) -> None:
        """Leave sums in this rank's own ghosts. Regions to come are parts, with the same chunks."""
        self._options.add("-DGIVING=1")

    @contextmanager
    def one_block(self) -> Iterator[None]:
        """Let a block run what is added, of the same cells, chunk by chunk, item by item."""
        first = len(self._items)
        yield
        self._followers += range(first + 1, len(self._items))

    def add_copy(self, kind: int, part: Part, slot: Slot) -> None:
        """Copy a part to or from its packed form, chunk by chunk.

        `kind` is ``PACK``, ``UNPACK``, ``PUT_LL`` or ``GET_LL``, or one that sets to zero what it
        sends.
        """
        if slot.far is not None and slot.ghosts is None and kind in (PACK, UNPACK):
            near = part.seen(self._layouts[part.field])
            sender, receiver = (near, slot.far) if kind == PACK else (slot.far, near)
            order = self._order(part, sender, receiver)
            if order:
                self._add_tiles(kind, part, order, slot)
                return
        cells = self._cells(part, LL_UNIT if kind in _BY_LL else ALIGN)
        target = 0
        if slot.ghosts is not None:
            there = slot.ghosts.cells(cells.unit)
            target = self._upload_ghosts(slot.ghosts, there)
            if kind == UNPACK:
                self._add_ready(part.field, target)
            else:
                cells = self._cells(part, there.unit)
        if kind in _BY_LL:
            self._count_ll_chunks(part)
        if kind == PUT_LL_AND_ZERO:
            self._adding |= 1 << self._addend(part)[0]
        factors = self._factors(part) if kind in (UNPACK, GET_LL) else b""
        if factors:
            target = self._upload_target(_no_cells(), factors)
        self._add_part(part, cells, kind, slot, target, _scaled(factors))

    def add_local(self, part: Part, target: Part, *, shares_gpu: bool = False) -> None:
        """Copy a part to another part of this rank's fields, in units that both allow."""
        ends = (each.seen(self._layouts[each.field]) for each in (part, target))
        order = self._order(part, *ends)
        slot = Slot(0, shares_gpu=shares_gpu)
        if order and part.nbytes >= _MIN_TILED_NBYTES:
            self._add_tiles(LOCAL, part, order, slot, target)
            return
        other = self._cells(target, self._cells(part, ALIGN).unit)
        cells = self._cells(part, other.unit)
        factors = self._factors(target)
        address = self._upload_target(self._record(target, other), factors)
        self._add_part(part, cells, LOCAL, slot, address, _scaled(factors))

    def add_region(self, region: Part, sources: Sequence[Source], put: Slot | None = None) -> None:
        """Add what arrives to a region, source by source, once its cells are `put` by LL, if so."""
        element, size = self._addend(region)
        self._adding |= 1 << element
        steps = [chunks(n, shares_gpu=slot.shares_gpu)[1] for _, _, n, slot in sources]
        self._has_flags |= any(slot.flags for *_, slot in sources)
        step = min(steps)
        # So many chunks later than a region's chunk its cells may be in a part.
        later = [
            (step - 1 + source.nbytes - region.nbytes) // of_part
            for source, of_part in zip(sources, steps, strict=True)
        ]
        place = (0, 0) if put is None else (put.address, put.parity_offset)
        item = Item(
            self._record(region, self._cells(region, size)),
            *place,
            target=self._upload_sources(sources, steps, size),
            nunits=region.nbytes // size,
            kind=ADD if put is None else SWAP_LL,
            log_rows=len(sources),
            element=element,
            begin=max(later),
            chunks=-(-region.nbytes // step),
            step=step // size,
        )
        self._items.append(item)
        self._count_ll_chunks(region)

    def add_sum(self, part: Part, slot: Slot, rows: Any = None) -> None:
        """Add packed cells to a part, which must not name a cell twice.

        `rows` selects some of the indices of a part; default: all of them.
        """
        dtype = self._layouts[part.field].dtype
        added, size = self._addend(part)
        whole = packed_layout(part, wire_nbytes(dtype.itemsize, dtype, self._wire))
        source = Part.of_box(part.field, whole, Box((0,) * len(part.shape), part.shape))
        if rows is not None and part.indices is not None and part.axis is not None:
            source = Part.of_indices(part.field, whole, part.axis, rows)
            layout = self._layouts[part.field]
            part = Part.of_indices(part.field, layout, part.axis, part.indices[rows])
            part = part._replace(nbytes=wire_nbytes(part.nbytes, dtype, self._wire))
        on_way = wire_nbytes(size, dtype, self._wire)
        cells, there = self._cells(part, size), StridedCells.of(source, whole, on_way)
        factors = self._factors(part)
        address = self._upload_target(self._record(source, there), factors)
        self._add_part(part, cells, UNPACK, slot, address, added + _scaled(factors))

    def add_signal(self, kind: int, flag: int, stalled_on: int = 0) -> None:
        """Store a flag (``PACK``), or wait for one (``UNPACK``), and copy nothing."""
        self._items.append(Item(_no_cells(), stalled_on=stalled_on, kind=kind, flags=[flag]))

    @property
    def nparts(self) -> int:
        """How many parts and signals there are: a part may have many items."""
        return len(self._items)

    @property
    def is_ll(self) -> bool:
        by_ll = all(item.kind in _BY_LL for item in self._items)
        return by_ll and not (self._has_flags or self._followers)

    @property
    def options(self) -> tuple[str, ...]:
        """What the compiler is told, so that other plans have no code for it."""
        adding = [f"-DADDING={self._adding}"] if self._adding else []
        return *sorted(self._options), *adding

    @property
    def log_ll_chunks(self) -> int:
        """Log2, rounded up, of the chunks of the largest part by LL."""
        return (self._max_ll_chunks - 1).bit_length()

    def load(self) -> ItemArray:
        """Copy the items to the GPU, in the order of `records`."""
        return ItemArray(self._upload(self.records()), len(self), self.options)

    def records(self) -> Array:
        """Return the items in their order, as `ITEM_RECORD`; a record of zeros if there is none.

        An item that waits comes after the item of another rank that it waits for, in the order of
        all ranks: chunk k of a part is packed at position k, and waited for at a later one. A store
        into ghosts waits as well, for an item of kind ``READY``: these come first.
        """
        if not self._items:
            return _records(())
        parts = _records(self._items)
        begin, lengths, steps = np.array([item[-3:] for item in self._items]).T
        waits = np.isin(parts["kind"], _WAITING)
        place = 2 * begin + (2 * _AHEAD + 1) * waits
        for at in self._followers:
            place[at] = place[at - 1]
        part = np.repeat(np.arange(len(parts)), lengths)
        index = np.arange(len(part)) - (np.cumsum(lengths) - lengths)[part]
        order = np.argsort(place[part] + 2 * index, kind="stable")
        part, index = part[order], index[order]
        # NumPy copies records as bytes in a tenth of the time that it takes field by field.
        found, step = parts.view(f"V{ITEM.size}")[part].view(ITEM_RECORD), steps[part]
        found["first"] = index * step
        found["nunits"] = np.minimum(found["nunits"] - found["first"], step)
        flags = [flag for item in self._items for flag in item.flags or [0] * item.chunks]
        found["flag"] = np.array(flags, np.uint64)[order]
        return self._chained(found, part)

    def ll_parts(self) -> Array:
        """Return the parts that travel by LL, an item each: parts to send come first."""
        return _records([item for kind in _BY_LL for item in self._items if item.kind == kind])

    def _chained(self, records: Array, part: Array) -> Array:
        """Return items of these parts, with those that follow another one in its block behind."""
        if not self._followers:
            return records
        is_head = ~np.isin(part, self._followers)
        begins = np.flatnonzero(is_head)
        more = np.diff(begins, append=len(part)) - 1
        records["more"][begins] = more
        records["next"][begins] = len(begins) + np.cumsum(more) - more
        return np.concatenate([records[is_head], records[~is_head]])

    def _count_ll_chunks(self, part: Part) -> None:
        self._max_ll_chunks = max(self._max_ll_chunks, -(-part.nbytes // LL_CHUNK_NBYTES))

    def _add_ready(self, field: int, ghosts: int) -> None:
        """Signal that ghosts may be written, before any other item: the sender waits for it."""
        self._items.append(Item(_no_cells(field), target=ghosts, kind=READY, begin=-1))

    def _upload_ghosts(self, ghosts: Ghosts, cells: StridedCells) -> int:
        record = np.zeros(1, GHOSTS_RECORD)
        record["part"] = np.frombuffer(self._record(ghosts.part, cells), PART_RECORD)
        record["field"], record["ready"] = ghosts.address, ghosts.ready
        return self._upload(record)

    def _upload_sources(self, sources: Sequence[Source], steps: Sequence[int], size: int) -> int:
        """Return the address of sources, which have chunks of `steps` bytes and units of `size`."""
        records = np.zeros(len(sources), SOURCE_RECORD)
        records["chunk_nbytes"] = steps
        for record, (part, layout, _, slot) in zip(records, sources, strict=True):
            cells = self._record(part, StridedCells.of(part, layout, size))
            record["part"] = np.frombuffer(cells, PART_RECORD)[0]
            record["packed"], record["parity_offset"] = slot.address, slot.parity_offset
            record["stalled_on"] = slot.stalled_on
            if slot.flags:
                record["flags"] = slot.flags[0]
                record["flag_nbytes"] = slot.flags[-1] - slot.flags[-2:][0]
        return self._upload(records)

    def _cells(self, part: Part, widest: int) -> StridedCells:
        """Return the cells of a part in units of `widest` bytes at most."""
        layout = self._layouts[part.field]
        # Numbers are rounded one by one.
        number = widest if self._wire is None else float_nbytes(layout.dtype)
        alignment = min(widest, number, self._alignments[part.field])
        if part.box is None:
            return StridedCells.of(part, layout, alignment)
        # Many fields have the same layout, and the same cells in a message.
        known = layout, part.box, part.turn, alignment
        cells = self._known.get(known)
        if cells is None:
            cells = self._known[known] = StridedCells.of(part, layout, alignment)
        return cells

    def _record(self, part: Part, cells: StridedCells) -> bytes:
        indices = part.indices
        packed = cells.packed if indices is None else cells.pack(self._upload(indices))
        if part.slide is not None and self._places_of is not None:
            self._options.add("-DSLIDING=1")
            packed = cells.pack(self._places_of(part.slide, part.shape[part.slide.axis]))
        return packed + FIELD.pack(part.field, cells.unit)

    def _packed_unit(self, field: int, cells: StridedCells) -> int:
        """Return the bytes of a unit where it lies packed."""
        dtype = self._layouts[field].dtype
        if self._wire is not None and cells.unit != float_nbytes(dtype):
            raise UnsupportedError(f"a field of {dtype} is not aligned to its elements")
        return wire_nbytes(cells.unit, dtype, self._wire)

    def _add_part(
        self, part: Part, cells: StridedCells, kind: int, slot: Slot, target: int, element: int
    ) -> None:
        """Add the items of a part; `target` and `element` are as `ITEM_RECORD` has them."""
        unit = self._packed_unit(part.field, cells)
        record, nunits = self._record(part, cells), part.nbytes // unit
        count, step = chunks(part.nbytes, shares_gpu=slot.shares_gpu)
        places = slot.address, slot.parity_offset, 0, slot.stalled_on, target
        cut = slot.flags[:count], 0, count, step // unit
        self._items.append(Item(record, *places, 0, nunits, kind, element, 0, 0, 0, 0, *cut))

    def _upload_target(self, record: bytes, factors: bytes) -> int:
        """Return the address of a part with factors behind it, if any."""
        return self._upload(np.frombuffer(record + factors, np.uint8))

    def _factors(self, part: Part) -> bytes:
        """Return the record of what a part is computed with where it arrives; empty for nothing."""
        if part.factors is None:
            return b""
        dtype = self._layouts[part.field].dtype
        number = number_of(dtype)
        is_pair = number is not None and number.kind == "c"
        size = dtype.itemsize // (1 + is_pair)
        if number is None or self._cells(part, size).unit != size:
            raise UnsupportedError(f"a field of {dtype} is not aligned to its elements")
        self._options |= {"-DSCALED=1", "-fmad=false"}  # each product and each sum is rounded
        record = np.zeros(1, FACTORS_RECORD)
        for at, (name, each) in enumerate(part.factors._asdict().items()):
            if each is not None:
                record[name] = each.tobytes().ljust(16, b"\0")
                record["has"][0, at] = 1
        added = ADDED.index(number.added_as)
        record["element"] = len(ADDED) + (size == 8) if is_pair else added
        return record.tobytes()

    def _addend(self, part: Part) -> tuple[int, int]:
        """Return the type of the addends, and its bytes: a complex number is two of them."""
        dtype = self._layouts[part.field].dtype
        number = number_of(dtype)
        if number is None:
            raise UnsupportedError(f"elements of {dtype} cannot be added on CUDA")
        size = dtype.itemsize // (2 if number.kind == "c" else 1)
        if self._cells(part, size).unit != size:
            raise UnsupportedError(f"a field of {dtype} is not aligned to its elements")
        return ADDED.index(number.added_as), size

    def _order(self, part: Part, sender: FieldLayout, receiver: FieldLayout) -> tuple[int, ...]:
        """Return the order in which chunks of a part travel, as `travel_order`."""
        if self._tiled_nbytes not in (None, sender.dtype.itemsize):
            return ()
        return travel_order(part, sender, receiver)

    def _add_tiles(
        self, kind: int, part: Part, order: Sequence[int], slot: Slot, target: Part | None = None
    ) -> None:
        """Add chunks that are boxes, for a part whose receiver has another order of axes."""
        near = End.of(part, self._layouts[part.field], order)
        size = near.layout.dtype.itemsize
        if kind != PACK:
            self._options.add(f"-DTILED={size}")
        factors = b"" if kind == PACK else self._factors(target or part)
        most, step = chunks(part.nbytes, shares_gpu=slot.shares_gpu)
        boxes = list(chunks_of(near.shape, size, step, most))
        there = near if target is None else End.of(target, self._layouts[target.field], order)
        if kind != PACK and there.layout.strides[-2] < 0:
            self._options.add("-DREVERSED=1")
        targets = [0] * len(boxes)
        if target is not None or factors:
            records = [self._record(target or part, box.cells(there)) + factors for box in boxes]
            first = self._upload(np.frombuffer(b"".join(records), np.uint8))
            targets = [first + at * len(records[0]) for at in range(len(boxes))]
        for index, box in enumerate(boxes):
            rows, columns = (0, 0) if kind == PACK else box.log_tile(size)
            alignment = self._alignments[part.field]
            cells = box.wide_cells(near, alignment) if kind == PACK else box.cells(near)
            chunk = Item(
                self._record(part, cells),
                slot.address + box.begin,
                slot.parity_offset,
                stalled_on=slot.stalled_on,
                target=targets[index],
                nunits=prod(cells.extents),
                kind=kind,
                element=_scaled(factors),
                log_rows=rows,
                log_columns=columns,
                flags=slot.flags[index : index + 1],
                begin=index,
            )
            self._items.append(chunk)


def packed_layout(part: Part, itemsize: int) -> FieldLayout:
    """Return the layout of a part where it lies packed, in elements of so many bytes."""
    steps = tuple(prod(part.shape[axis + 1 :]) * itemsize for axis in range(len(part.shape)))
    return FieldLayout(part.shape, steps, np.dtype(f"V{itemsize}"), None)


def _scaled(factors: bytes) -> int:
    """Return what tells kernels that an item has factors."""
    return SCALED if factors else 0


def _no_cells(field: int = 0) -> bytes:
    part = np.zeros(1, PART_RECORD)
    part["unit"], part["field"] = 1, field
    return part.tobytes()


def _records(items: Sequence[Item]) -> Array:
    if not items:
        return np.zeros(1, ITEM_RECORD)
    return np.frombuffer(b"".join([ITEM.pack(*item[:-4]) for item in items]), ITEM_RECORD)

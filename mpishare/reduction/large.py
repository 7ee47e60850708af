"""Large fields in host memory: in place if they are in windows, else chunk by chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishare.errors import ClosedError
from mpishare.plans.layout import FieldLayout, address_of, array_at
from mpishare.reduction.slots import REDUCE
from mpishare.runtime.context import Location

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from mpishare.reduction.slots import Slots
    from mpishare.runtime.context import NodeContext

    Array = np.ndarray[Any, Any]
    Fold = Callable[[Sequence[Array], Array], None]

_MIN_SHARED_NBYTES = 512 << 10  # times the other ranks
_MIN_IN_PLACE_NBYTES = 1 << 20
_CHUNK_NBYTES = 1 << 20
_BLOCK_NBYTES = 64 << 10  # folded, and stored in all fields, while they are in the cache
_LINE_NBYTES = 128  # no two ranks write to one
_NOT_IN_A_WINDOW = Location(0, 0, 0)  # windows count from 1


def folds_all(nranks: int, nbytes: int) -> bool:
    """Whether every rank folds all elements; folding a share of them costs a second barrier."""
    return (nranks - 1) * nbytes < _MIN_SHARED_NBYTES


def capacities(nranks: int, count: int, itemsize: int) -> tuple[int, int]:
    """Return the elements of a small slot and of a large one, for fields of so many.

    All chunks of a field but the last fill a large slot, and that one nearly does.
    """
    if folds_all(nranks, count * itemsize):
        return max(count, 1), 0
    nchunks = -(-count * itemsize // _CHUNK_NBYTES)
    return 1, -(-count // nchunks)


class LargeReduce:
    """Reduces packed fields of any size through the slots, or in place; `fold` is in rank order."""

    def __init__(self, context: NodeContext, slots: Slots, fold: Fold) -> None:
        self._context = context
        self._slots = slots
        self._fold = fold
        self._nranks = len(slots.pair[0])
        self._itemsize = slots.pair[0][0].itemsize

    def reduce(self, flat: Array) -> None:
        """Put the node's result into an array of one axis. Collective, host-blocking."""
        fields = self._fields(flat) if flat.nbytes >= _MIN_IN_PLACE_NBYTES else None
        if fields is not None:
            self._reduce_in_place(fields)
            return
        step = self._slots.large[0].size
        for begin in range(0, flat.size, step):
            self._reduce_chunk(flat[begin : begin + step])

    def _reduce_chunk(self, chunk: Array) -> None:
        """Fold this rank's share of a chunk into its slot, and copy the others' from theirs.

        In a slot its owner's share is a result, the rest are operands: one slot is enough. Results
        are written after a barrier, so the others have copied those of the chunk before; operands
        after all ranks have folded the last ones.
        """
        slots = self._slots
        place, parts = slots.place, [slot[: chunk.size] for slot in slots.large]
        # The same for all chunks, also the last: results stay results.
        shares = [self._share(slots.large[0].size, at) for at in range(self._nranks)]
        mine = shares[place]
        for others in (slice(0, mine.start), slice(mine.stop, None)):
            parts[place][others] = chunk[others]
        slots.meet(REDUCE)
        operands = [part[mine] for part in parts]
        result, operands[place] = operands[place], chunk[mine]
        self._fold(operands, result)
        chunk[mine] = result
        slots.meet(REDUCE)
        for part, share in zip(parts, shares, strict=True):
            if share is not mine:
                chunk[share] = part[share]

    def _fields(self, flat: Array) -> list[Array] | None:
        """Return all ranks' fields as mapped here; None unless all are in windows."""
        slots, context = self._slots, self._context
        slots.publish_place(context.locate(address_of(flat), flat.nbytes) or _NOT_IN_A_WINDOW)
        slots.meet(REDUCE)
        places = slots.places()
        if _NOT_IN_A_WINDOW in places:
            return None
        layout = FieldLayout.of_host(flat)
        return [array_at(self._address(place), layout) for place in places]

    def _address(self, place: Location) -> int:
        address = self._context.segment_address(place.window, place.rank)
        if address is None:
            raise ClosedError(f"{self._slots.name}: reduce failed: window {place.window} is closed")
        return address + place.offset

    def _reduce_in_place(self, fields: Sequence[Array]) -> None:
        """Fold this rank's share, which only it reads and writes, and store it in all fields."""
        slots, first = self._slots, fields[0]
        share = self._share(first.size, slots.place)
        step = _BLOCK_NBYTES // first.itemsize
        for begin in range(share.start, share.stop, step):
            block = slice(begin, min(begin + step, share.stop))
            self._fold([field[block] for field in fields], first[block])
            for field in fields[1:]:
                field[block] = first[block]
        slots.meet(REDUCE)
        slots.require_present()

    def _share(self, count: int, place: int) -> slice:
        """Return the slice of elements that a rank folds: whole cache lines but for the last."""
        line = _LINE_NBYTES // self._itemsize
        begin, end = (count * at // self._nranks // line * line for at in (place, place + 1))
        return slice(begin, count if place == self._nranks - 1 else end)

"""Large fields in host memory: in place where they live in windows, else chunk by chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishare.context import Location
from mpishare.errors import ClosedError
from mpishare.halo.host.copies import address_of, array_at
from mpishare.halo.layout import FieldLayout
from mpishare.reduction.slots import REDUCE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from mpishare.context import NodeContext
    from mpishare.reduction.slots import Slots

    Array = np.ndarray[Any, Any]
    Fold = Callable[[Sequence[Array], Array], None]

MIN_IN_PLACE_NBYTES = 64 << 10
_MIN_SHARED_NBYTES = 64 << 10
_BLOCK_NBYTES = 64 << 10  # folded, and stored in all fields, while they are in the cache
_NOT_IN_A_WINDOW = Location(0, 0, 0)  # windows count from 1


def folds_all(nranks: int, nbytes: int) -> bool:
    """Whether every rank folds all elements; a share of them costs a second meeting."""
    return (nranks - 1) * nbytes < _MIN_SHARED_NBYTES


class LargeReduce:
    """Reduces packed fields of any size through the slots, or where they are.

    Parameters
    ----------
    context : NodeContext
        The node's.
    name : str
        The plan's.
    slots : Slots
        Of the ranks.
    fold : callable
        ``fold(operands, out)`` combines arrays of all ranks in order.
    """

    def __init__(self, context: NodeContext, name: str, slots: Slots, fold: Fold) -> None:
        self._context = context
        self._name = name
        self._slots = slots
        self._fold = fold
        self._capacity = slots.pair[0][0].size
        self._nranks = len(slots.pair[0])

    def reduce(self, flat: Array) -> None:
        """Put the node's result into an array of one axis. Collective, host-blocking."""
        fields = self._fields(flat) if flat.nbytes >= MIN_IN_PLACE_NBYTES else None
        if fields is not None:
            self._reduce_in_place(fields)
            return
        for begin in range(0, flat.size, self._capacity):
            self._reduce_chunk(flat[begin : begin + self._capacity])

    def _reduce_chunk(self, chunk: Array) -> None:
        """Reduce elements that fit into a slot."""
        slots = self._slots
        parity = slots.parity = slots.parity ^ 1
        parts = [slot[: chunk.size] for slot in slots.pair[parity]]
        if folds_all(self._nranks, chunk.nbytes):
            parts[slots.place][...] = chunk
            slots.meet(REDUCE)
            self._fold(parts, chunk)
            return
        # My share of my own elements is read where it is.
        mine = self._share(chunk.size)
        before, behind = slice(0, mine.start), slice(mine.stop, chunk.size)
        result = parts[0]
        for others in (before, behind):
            parts[slots.place][others] = chunk[others]
        slots.meet(REDUCE)
        operands = [part[mine] for part in parts]
        operands[slots.place] = chunk[mine]
        self._fold(operands, result[mine])
        chunk[mine] = result[mine]
        slots.meet(REDUCE)
        for others in (before, behind):
            chunk[others] = result[others]

    def _fields(self, flat: Array) -> list[Array] | None:
        """Return the fields of all ranks as they are mapped here; None unless all live in windows.

        Each in a segment of its own: else what one rank stores may be another's operand.
        """
        slots, context = self._slots, self._context
        slots.publish_place(context.locate(address_of(flat), flat.nbytes) or _NOT_IN_A_WINDOW)
        slots.meet(REDUCE)
        places = slots.places()
        if _NOT_IN_A_WINDOW in places or len({place[:2] for place in places}) < len(places):
            return None
        layout = FieldLayout(flat.shape, flat.strides, flat.dtype, None)
        return [array_at(self._address(place), layout) for place in places]

    def _address(self, place: Location) -> int:
        address = self._context.segment_address(place.window, place.rank)
        if address is None:
            raise ClosedError(f"{self._name}: reduce failed: window {place.window} is closed")
        return address + place.offset

    def _reduce_in_place(self, fields: Sequence[Array]) -> None:
        """Fold my share, which no other rank reads or writes, and store it in all fields."""
        slots, first = self._slots, fields[0]
        share = self._share(first.size)
        step = _BLOCK_NBYTES // first.itemsize
        for begin in range(share.start, share.stop, step):
            block = slice(begin, min(begin + step, share.stop))
            self._fold([field[block] for field in fields], first[block])
            for field in fields[1:]:
                field[block] = first[block]
        slots.meet(REDUCE)
        slots.require_present()

    def _share(self, count: int) -> slice:
        """Return which of so many elements this rank folds."""
        at, nranks = self._slots.place, self._nranks
        return slice(count * at // nranks, count * (at + 1) // nranks)

"""What calls in GPU memory are given, as the kernels take it; it may be given again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cupy

from mpishare.plans.gpu.fields import place_of, scalar_of
from mpishare.plans.gpu.repeats import Repeated, SeenCalls
from mpishare.plans.layout import require_number
from mpishare.rows import records
from mpishare.rows.calls import int_of, require_like, require_numbers, spans_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mpishare.plans.layout import FieldLayout
    from mpishare.rows.calls import Span
    from mpishare.rows.form import Column, Form

_UNCHANGED = -1  # a bound that is no int of the call


class Words:
    """Describes columns to the kernels, those that come again once."""

    def __init__(self, form: Form, device: int) -> None:
        self._form, self._device, self._offsets = form, device, form.offsets(form.room)
        self.seen: SeenCalls[tuple[records.Lanes, int]] = SeenCalls(lambda _: None)

    def of(self, columns: Sequence[Any]) -> tuple[records.Lanes, int]:
        """Return the words of columns, and the rows of the shortest."""
        found = self.seen.get("columns", columns)
        if found is None:
            found = self._describe(columns)
            self.seen.put("columns", columns, found)
        return found

    def _describe(self, columns: Sequence[Any]) -> tuple[records.Lanes, int]:
        require_number(columns, len(self._form.columns))
        lanes, at = records.Lanes(), 0
        for number, (given, column) in enumerate(zip(columns, self._form.columns, strict=True)):
            address = self._address_of(given, column, number)
            nbytes = column.nbytes
            word = records.word_of(nbytes, address)
            for begin in range(0, nbytes, word):
                if at == records.MAX_LANES:
                    raise ValueError(
                        f"rows have more than {at} words, as column {number} begins at {address:#x}"
                    )
                slot = self._offsets[number]
                lanes.of[at] = records.Lane(address, slot, begin, nbytes, word)
                at += 1
        lanes.count = at
        return lanes, min(column.shape[0] for column in columns)

    def _address_of(self, given: Any, column: Column, number: int) -> int:
        if (
            type(given) is cupy.ndarray
            and given.dtype == column.dtype
            and given.shape[1:] == column.shape
            and given.ndim
            and given.flags.c_contiguous
            and given.data.device_id == self._device
        ):
            return int(given.data.ptr)  # most calls, in a tenth of the time
        address, layout = place_of(given, f"column {number}")
        require_like(layout, column, number, is_contiguous=layout.is_packed("C"))
        if layout.device != self._device:
            raise ValueError(f"column {number} is on GPU {layout.device} instead of {self._device}")
        return address

    def in_slot(self, lanes: records.Lanes, rows: int, scale: int) -> records.Lanes:
        """Return words of the same widths in a slot that is `scale` times as long as the first."""
        found = records.Lanes()
        found.copy(lanes)
        for lane in found.of[: found.count]:
            lane.column = rows + scale * lane.slot
        return found


class Sending(Repeated):
    """The launch of `send_rows` for columns and rows; ints among the bounds may change."""

    def __init__(
        self, engine: Any, columns: Sequence[Any], rows: Mapping[Any, Any], capturing: int
    ) -> None:
        super().__init__((), capturing, engine.launcher.where)
        self._engine = engine
        self.lanes, self.nrows = engine.words.of(columns)
        if any(column.shape[0] != self.nrows for column in columns):
            raise ValueError(f"columns have {[column.shape[0] for column in columns]} rows")
        self._spans = records.Spans()
        self._bounds: list[records.Bound] = []  # of the ints
        self._parts: list[tuple[int, int, int, int]] = []
        self.ints: Any = []
        self._blocks = 0
        for place, span in spans_of(engine.places, rows).items():
            self._describe(place, span)
        self.held = [*rows.values()]
        self.set(self.ints)

    def _describe(self, place: int, span: Span) -> None:
        """Store the rows for a key, all but their ints."""
        to, numbers = self._spans.of[place], span.numbers
        to.most, low, name = self.nrows, _UNCHANGED, "n"
        if numbers is None:
            low, name = self._find(to.low, span.low, "low"), "high"
        else:
            to.numbers, layout = address_of_ints(numbers, "row numbers")
            to.most, to.nbytes = layout.shape[0], layout.dtype.itemsize
        to.high.value = to.most
        high = _UNCHANGED if span.high is None else self._find(to.high, span.high, name)
        self._parts.append((low, high, to.most, self._engine.slots.rooms[place]))

    def _find(self, bound: records.Bound, number: Any, name: str) -> int:
        """Let a bound have a number: by its address on the GPU, or by the place returned."""
        if hasattr(number, "__cuda_array_interface__"):
            bound.at, bound.nbytes, _ = scalar_of(number, name)
            return _UNCHANGED
        self._bounds.append(bound)
        self.ints.append(int_of(number, name))
        return len(self.ints) - 1

    def set(self, ints: Sequence[int]) -> None:
        """Take other ints; raise for bounds that are not right."""
        count = 0
        for low, high, most, room in self._parts:
            first = 0 if low < 0 else ints[low]
            last = most if high < 0 else ints[high]
            if not 0 <= first <= last <= most:
                raise ValueError(f"rows {first} to {last} of {most}")
            count += last - first if last - first < room else room
        for bound, number in zip(self._bounds, ints, strict=True):
            bound.value = number
        self.ints, self.is_changed = ints, True
        blocks = self._engine.blocks_for(count, self.lanes.count)
        if blocks != self._blocks:
            self._blocks = blocks
            self.launches = [self.launch()]

    def launch(self, keys: int = records.ALL_KEYS) -> Any:
        """Return the launch, for all keys or for some once more."""
        arguments = self.lanes, self._spans, self.nrows, keys
        return self._engine.launch("send_rows", self._blocks, arguments)


def grouped(
    found: Sequence[tuple[int, records.Lanes, int]],
) -> list[tuple[records.Lanes, dict[int, int], list[int]]]:
    """Return what each launch takes, given the columns for each key and their rows.

    A launch has several sets of columns, of as many words, while there is room for these.
    """
    groups: list[tuple[records.Lanes, dict[int, int], list[int]]] = []
    for place, columns, rows in found:
        nlanes = columns.count
        lanes, set_of, capacities = groups[-1] if groups else (columns, {}, [])
        begin = nlanes * len(set_of)
        if not set_of or lanes.count != nlanes or begin + nlanes > records.MAX_LANES:
            lanes, set_of, capacities, begin = records.Lanes(), {}, [], 0
            groups.append((lanes, set_of, capacities))
        lanes.of[begin : begin + nlanes] = columns.of[:nlanes]
        lanes.count, set_of[place] = nlanes, len(set_of)
        capacities.append(rows)
    return groups


def parted(columns: Sequence[Any], rows: Mapping[Any, Any]) -> tuple[Any, list[Any], list[int]]:
    """Return the form of what `start` is given, the arrays and the ints in it."""
    form, arrays, ints = [*rows], [*columns], []
    for given in rows.values():
        form.append(type(given))
        for each in given if type(given) is tuple else (given,):
            if type(each) is int:
                ints.append(each)
            else:
                arrays.append(each)
            form.append(type(each))
    return tuple(form), arrays, ints


def address_of_ints(array: Any, name: str) -> tuple[int, FieldLayout]:
    """Return the address of an array of ints along one axis, and its layout."""
    address, layout = place_of(array, name)
    require_numbers(layout, name)
    if not layout.is_packed("C"):
        raise ValueError(f"{name} are not contiguous: give a copy")
    return address, layout

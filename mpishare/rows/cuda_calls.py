"""What calls in GPU memory are given, as the kernels take it; it may be given again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from mpishare.plans.gpu.fields import ints_of, place_of, scalar_of
from mpishare.plans.gpu.repeats import Repeated
from mpishare.plans.layout import require_number
from mpishare.rows import records
from mpishare.rows.calls import int_of, require_like, spans_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mpishare.rows.calls import Span
    from mpishare.rows.form import Column, Form

_UNCHANGED = -1  # a bound that is no int of the call


class Words:
    """Describes columns to the kernels, by the words of a row; quickly, as they may be new ones."""

    def __init__(self, form: Form, device: int) -> None:
        self._columns, self._slots, self._device = form.columns, form.offsets(form.room), device
        self._nbytes = [column.nbytes for column in form.columns]
        self._of_sizes: dict[tuple[int, ...], tuple[Any, list[int]]] = {}

    def of(self, columns: Sequence[Any]) -> tuple[Any, int]:
        """Return the words of columns, and the rows of the shortest."""
        require_number(columns, len(self._columns))
        found = [*map(self._address_of, columns, self._columns, range(len(columns)))]
        sizes = tuple(map(records.word_of, self._nbytes, found))
        if sizes not in self._of_sizes:
            self._of_sizes[sizes] = self._describe(sizes, found)
        template, column_of = self._of_sizes[sizes]
        lanes = records.Lanes.from_buffer_copy(template)
        addresses = np.frombuffer(lanes, records.LANE, len(column_of))["column"]
        addresses[:] = [found[number] for number in column_of]
        return lanes, min(column.shape[0] for column in columns)

    def _describe(self, sizes: Sequence[int], found: Sequence[int]) -> tuple[Any, list[int]]:
        """Return words of these sizes, all but their addresses, and of which column each is."""
        lanes, column_of = records.Lanes(), list[int]()
        each = zip(self._nbytes, sizes, self._slots, strict=False)
        for number, (nbytes, size, slot) in enumerate(each):
            for begin in range(0, nbytes, size):
                if (at := len(column_of)) == records.MAX_LANES:
                    address = f"column {number} begins at {found[number]:#x}"
                    raise ValueError(f"rows have more than {at} words, as {address}")
                lanes.of[at] = records.Lane(0, slot, begin, nbytes, size)
                column_of.append(number)
        lanes.count = len(column_of)
        return lanes, column_of

    def _address_of(self, given: Any, column: Column, number: int) -> int:
        if type(given) is cupy.ndarray:  # most: a layout of it would take ten times as long
            memory, found, is_packed = given.data, given, given.flags.c_contiguous
            address, ordinal = memory.ptr, memory.device_id
        else:
            address, found = place_of(given, f"column {number}")
            is_packed, ordinal = found.is_packed("C"), found.device
        require_like(found, column, number, is_contiguous=is_packed)
        if ordinal != self._device:
            raise ValueError(f"column {number} is on GPU {ordinal} instead of {self._device}")
        return int(address)


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
        self._bounds: list[Any] = []  # of the ints
        self._parts: list[tuple[int, int, int, int]] = []
        self._blocks, found = 0, spans_of(engine.places, rows)
        # In the order in which they are given.
        ints = [each for place, span in found.items() for each in self._describe(place, span)]
        self.set(tuple(ints))

    def _describe(self, place: int, span: Span) -> list[int]:
        """Store the rows for a key, all but their ints, and return these."""
        to, numbers, ints = self._spans[place], span.numbers, list[int]()

        def find(bound: Any, number: Any, name: str) -> int:
            """Let a bound have a number: by its address on the GPU, or by the place returned."""
            if hasattr(type(number), "__cuda_array_interface__"):
                bound.at, bound.nbytes, _ = scalar_of(number, name)
                return _UNCHANGED
            self._bounds.append(bound)
            ints.append(int_of(number, name))
            return len(self._bounds) - 1

        to.most, low, high = self.nrows, _UNCHANGED, _UNCHANGED
        if numbers is not None:
            to.numbers, to.most, to.nbytes = ints_of(numbers, "row numbers")
        to.high.value = to.most
        if numbers is None:
            low = find(to.low, span.low, "low")
        if span.high is not None:
            high = find(to.high, span.high, "high" if numbers is None else "n")
        self._parts.append((low, high, to.most, self._engine.slots.rooms[place]))
        return ints

    def set(self, ints: tuple[int, ...]) -> None:
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
    found: Sequence[tuple[int, Any, int]],
) -> list[tuple[Any, dict[int, int], list[int]]]:
    """Return what each launch takes, given the columns for each key and their rows.

    A launch has several sets of columns, of as many words, while there is room for these.
    """
    groups: list[tuple[Any, dict[int, int], list[int]]] = []
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

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
        self._spans, ints = records.Spans(), list[int]()
        given = spans_of(engine.places, rows)
        # In the order in which they are given.
        self._parts = [self._describe(place, span, ints) for place, span in given.items()]
        self._blocks = 0
        self.set(tuple(ints))

    def _describe(self, place: int, span: Span, ints: list[int]) -> tuple[Any, ...]:
        """Store the rows for a key, and append their ints, which may differ at the next call.

        Return the bounds, which of them are ints, how many rows there are, and how many go at once.
        """
        to, most, name = self._spans[place], self.nrows, "high"
        if span.numbers is not None:
            to.numbers, most, to.nbytes = ints_of(span.numbers, "row numbers")
            name = "n"

        def is_int(bound: Any, number: Any, name: str) -> bool:
            if hasattr(type(number), "__cuda_array_interface__"):
                bound.at, bound.nbytes, _ = scalar_of(number, name)
                return False
            ints.append(int_of(number, name))
            return True

        to.most, low, high = most, to.low, to.high
        has_low = span.numbers is None and is_int(low, span.low, "low")
        has_high = span.high is not None and is_int(high, span.high, name)
        return low, high, has_low, has_high, most, self._engine.slots.rooms[place]

    def set(self, ints: tuple[int, ...]) -> None:
        """Take other ints; raise for bounds that are not right."""
        given, count, self.ints = iter(ints), 0, None
        for low, high, has_low, has_high, most, room in self._parts:
            # Where the GPU has a bound, this value is not read.
            first = next(given) if has_low else 0
            last = next(given) if has_high else most
            if not 0 <= first <= last <= most:
                raise ValueError(f"rows {first} to {last} of {most}")
            low.value, high.value = first, last
            count += min(last - first, room)
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

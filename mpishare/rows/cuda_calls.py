"""What calls in GPU memory are given, as the kernels take it; it may be given again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cupy

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


def words_of(form: Form, device: int, columns: Sequence[Any]) -> tuple[Any, int]:
    """Describe columns to the kernels; return their words, and the rows of the shortest."""
    require_number(columns, len(form.columns))
    lanes, slots, at = records.Lanes(), form.offsets(form.room), 0
    for number, (given, column) in enumerate(zip(columns, form.columns, strict=True)):
        address, nbytes = _address_of(given, column, number, device), column.nbytes
        word = records.word_of(nbytes, address)
        for begin in range(0, nbytes, word):
            if at == records.MAX_LANES:
                raise ValueError(
                    f"rows have more than {at} words, as column {number} begins at {address:#x}"
                )
            lanes.of[at] = records.Lane(address, slots[number], begin, nbytes, word)
            at += 1
    lanes.count = at
    return lanes, min(column.shape[0] for column in columns)


def _address_of(given: Any, column: Column, number: int, device: int) -> int:
    if type(given) is cupy.ndarray:  # most: a layout of it would take ten times as long
        address, found, is_packed = given.data.ptr, given, given.flags.c_contiguous
        ordinal = given.data.device_id
    else:
        address, found = place_of(given, f"column {number}")
        is_packed, ordinal = found.is_packed("C"), found.device
    require_like(found, column, number, is_contiguous=is_packed)
    if ordinal != device:
        raise ValueError(f"column {number} is on GPU {ordinal} instead of {device}")
    return int(address)


class Sending(Repeated):
    """The launch of `send_rows` for columns and rows; ints among the bounds may change."""

    def __init__(
        self, engine: Any, columns: Sequence[Any], rows: Mapping[Any, Any], capturing: int
    ) -> None:
        super().__init__((), capturing, engine.launcher.where)
        self._engine = engine
        self.lanes, self.nrows = words_of(engine.form, engine.launcher.device, columns)
        if any(column.shape[0] != self.nrows for column in columns):
            raise ValueError(f"columns have {[column.shape[0] for column in columns]} rows")
        self._spans = records.Spans()
        self._bounds: list[Any] = []  # of the ints
        self._parts: list[tuple[int, int, int, int]] = []
        self._blocks, found = 0, spans_of(engine.places, rows)
        # In the order of `parted`.
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

"""The engine for columns in host memory: rows go through slots, or in messages to other nodes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.backends import handle_of
from mpishare.coordination import recording
from mpishare.errors import CapacityError
from mpishare.plans.engine import PlanEngine
from mpishare.plans.layout import as_numpy, require_ints, require_number, require_writeable
from mpishare.rows.calls import int_of, require_count, require_like, spans_of
from mpishare.rows.messages import MessagePair, late
from mpishare.rows.slots import HEADERS_NBYTES, SlotPair, headers_of, move_rows
from mpishare.runtime.route import HOST

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mpishare.plans.engine import RoutedSetup
    from mpishare.rows.calls import Span
    from mpishare.rows.form import Form

    Array = np.ndarray[Any, Any]
    Part = tuple[int | Array, int]
    """The first row, or the numbers of rows, and how many."""

_NONE = 0, 0  # a part without rows


class HostRows(PlanEngine):
    """The rows of one plan in host memory. Collective to make, host-blocking.

    `CudaRows` has the same methods. What a call is given is checked before anything is published:
    `TypeError` or `ValueError`.
    """

    def __init__(self, setup: RoutedSetup, form: Form) -> None:
        self.name, self.form, self.rank = setup.name, form, setup.comm.rank
        self.places = form.places
        self._setup, self._comm = setup, setup.comm
        self.agreement = setup.context.agreement
        self.epoch, self._is_open, self._sent = 0, False, [0] * len(form.keys)
        first, nkeys = form.first_keys(setup.comm.ranks_here)
        self._headers = setup.comm.take_memory(setup.name, HEADERS_NBYTES * max(1, nkeys))
        self.move: Callable[..., bool] = move_rows
        self._count: Callable[..., Any] | None = None
        if (compiled := setup.context.compiled) is not None:
            kinds = form.columns
            self.move = partial(compiled.move_rows, np.ndarray, [each.nbytes for each in kinds])
            described = [each.dtype for each in kinds], [each.shape for each in kinds]
            self._count = partial(compiled.count_rows, np.ndarray, *described)
        self._pairs: list[SlotPair | MessagePair] = []
        barrier = setup.context.memory_barrier
        for place, key in enumerate(form.keys):
            if setup.my_routes[key.rank] is not HOST:
                self._pairs.append(MessagePair(self._comm, form, key))
                continue
            there = headers_of(self._headers, first[key.rank] + key.place)
            here = headers_of(self._headers, first[self.rank] + place)
            peer = f"{self.name}: rank {key.rank}"
            self._pairs.append(SlotPair(form, there, here, barrier, peer))

    @property
    def staging_nbytes(self) -> int:  # type: ignore[override]
        """Bytes of this rank's slots, and of the headers of its node."""
        return self._headers.nbytes + sum(each.nbytes for each in self._pairs)

    # --- checks

    def require(
        self, columns: list[Any], stream: Any, *, are_written: bool = True
    ) -> tuple[list[Array], int, int]:
        """Return the columns of a call, and the rows of the shortest and of the longest."""
        if recording.UNDER_WAY:
            recording.require_none(self.name, "its columns are in host memory")
        if stream is not None:
            handle_of(stream)
        if self._count is not None and (found := self._count(columns, are_written)) is not None:
            return columns, *found
        kinds = self.form.columns
        require_number(columns, len(kinds))
        arrays = [as_numpy(each, "a column") for each in columns]
        for number, (array, kind) in enumerate(zip(arrays, kinds, strict=True)):
            require_like(array, kind, number, is_contiguous=array.flags.c_contiguous)
            if are_written:
                require_writeable(array, f"column {number}")
        lengths = [*map(len, arrays)]
        return arrays, min(lengths), max(lengths)

    def _require_room(self, rows: int, room: int) -> None:
        if rows > room:
            raise CapacityError(
                f"{self.name}: wait failed: {rows} rows into arrays of {room}. Call wait again, "
                "with longer ones or none"
            )

    # --- calls

    def again(self, *_: Any) -> bool:
        """Do nothing: a call is no quicker for having been made before."""
        return False

    def start(self, columns: list[Any], rows: Mapping[Any, Any], stream: Any) -> None:
        """Send rows of the columns."""
        arrays, nrows, longest = self.require(columns, stream, are_written=False)
        if nrows < longest:
            raise ValueError(f"columns have {nrows} to {longest} rows")
        parts: list[Part] = [_NONE] * len(self.places)
        for place, span in spans_of(self.places, rows).items():
            parts[place] = _as_part(span, nrows)
        self.send(arrays, parts, nrows)

    def send(self, arrays: list[Array], parts: Sequence[Any], nrows: int) -> None:
        """Send parts of the arrays, one a key; `ValueError` for numbers of no rows."""
        epoch = self.epoch + 1
        for pair, (rows, count) in zip(self._pairs, parts, strict=True):
            pair.reserve(count)
            slot = pair.slot(epoch)
            if count and not self.move(slot, 0, arrays, rows, count, nrows):
                used: Any = rows[:count]
                raise ValueError(f"row numbers from {used.min()} to {used.max()} of {nrows} rows")

        with self.agreement.blocked(f"{self.name}: start"):
            self.epoch = epoch
            for pair, (_, count) in zip(self._pairs, parts, strict=True):
                pair.send(count, epoch)
            self._sent = [count for _, count in parts]
            self._is_open = True

    def receive(self) -> None:
        """Wait until the rows of all peers have come."""
        if not self._is_open:
            return
        call = f"{self.name}: wait"
        with self.agreement.blocked(call):
            spins = self._setup.context.spins_per_yield
            if not all(each.spin(self.epoch, spins) for each in self._pairs):
                self._wait(call)
            for each in self._pairs:
                each.open(self.epoch)
            self._is_open = False

    def place(self, into: Mapping[Any, list[Any]], stream: Any) -> None:
        """Receive: into arrays by the names of keys, the others into slots."""
        self.receive()
        found = []
        for name, columns in into.items():
            each = self._pairs[self.places[name]]
            arrays, shortest, _ = self.require(columns, stream)
            self._require_room(each.count, shortest)
            found.append((each, arrays))
        for each, arrays in found:
            if each.count:
                self.move(arrays, 0, each.columns, 0, each.count, 0)

    def append(self, columns: list[Any], count: Any, stream: Any) -> Any:
        """Receive all behind `count`, and return the new count."""
        first = count_of(count)
        self.receive()
        arrays, shortest, _ = self.require(columns, stream)
        self._require_room(first + sum(each.count for each in self._pairs), shortest)
        for each in self._pairs:
            self.move(arrays, first, each.columns, 0, each.count, 0)
            first += each.count
        return store_count(count, first)

    def counts(self) -> tuple[list[int], list[int]]:
        """Return how many rows came and went, by key; host-blocking."""
        self.receive()
        return [each.count for each in self._pairs], self._sent

    @property
    def device_counts(self) -> Array:
        """How many rows come, in the memory of the columns."""
        return np.array(self.counts()[0], np.int64)

    def received(self, place: int) -> list[Any]:
        """Return the rows that came, where they are; host-blocking."""
        self.receive()
        each = self._pairs[place]
        return [column[: each.count] for column in each.columns]

    def _wait(self, call: str) -> None:
        def pending() -> list[int]:
            return late(self.form.keys, self._pairs, self.epoch)

        if all(isinstance(each, SlotPair) for each in self._pairs):
            self._comm.wait(call, pending)
        else:
            self._comm.wait_anywhere(call, pending)

    def close(self) -> None:
        """Unmap the slots, and give the headers back."""
        for each in self._pairs:
            each.close()
        self._headers.close()


def count_of(count: Any) -> int:
    """Return a count of rows, given as an int or as an array that can be updated."""
    if isinstance(count, np.ndarray):
        require_count(count)
        require_writeable(count, "count")
    if (value := int_of(count, "count")) < 0:
        raise ValueError(f"count is {value}")
    return value


def store_count(count: Any, value: int) -> Array:
    """Return a count given as an int as a new array; update one that is given as an array."""
    if not isinstance(count, np.ndarray):
        return np.array(value, np.int64)
    count[...] = value
    return count


def _as_part(span: Span, nrows: int) -> Part:
    """Return the rows of a span; raise for those that the columns do not have.

    Whether there are rows of all numbers is seen when they are copied.
    """
    low, high, numbers = span
    if numbers is None:
        low, high = int_of(low, "low"), int_of(high, "high")
        if not 0 <= low <= high <= nrows:
            raise ValueError(f"rows {low} to {high} of {nrows}")
        return low, high - low
    array = as_numpy(numbers, "row numbers")
    require_ints(array, "row numbers")
    count = len(array) if high is None else int_of(high, "n")
    if not 0 <= count <= len(array):
        raise ValueError(f"{count} of {len(array)} row numbers")
    return np.ascontiguousarray(array), count

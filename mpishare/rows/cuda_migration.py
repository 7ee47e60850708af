"""Rows that go to the ranks that an array names, out of columns in GPU memory."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.errors import UnsupportedError
from mpishare.plans.gpu.fields import ints_of
from mpishare.plans.gpu.repeats import Repeated
from mpishare.rows import records

if TYPE_CHECKING:
    from mpishare.backends import StreamInfo, driver
    from mpishare.rows.cuda import CudaRows

_ROWS_OF_BLOCK = 4096  # whose goals a block looks through
_LEAST_ROWS, _MAX_ROWS = 1024, 1 << 31


class CudaMigration:
    """See `HostMigration`. Its memory is that of the engine, until that closes."""

    def __init__(self, engine: CudaRows, *, stable: bool) -> None:
        self._engine, self._stable = engine, stable
        launcher, form = engine.launcher, engine.form
        goals = np.full(engine.size + 1, records.STRANGER, np.int32)
        goals[0] = records.DROPPED
        for place, key in reversed([*enumerate(form.keys)]):
            goals[key.rank + 1] = place
        self._granted = 0  # how many times `room` rows a peer may send
        engine.migration, engine.slots.settled = self, b""
        self._scratch, self._capacity = records.Scratch(), 0
        self._scratch.of_blocks = self._take(4 * records.GOALS * launcher.max_blocks)
        self._goals = self._take(goals.nbytes)
        engine._backend.upload(self._goals, goals, 0)
        engine._context.drain(engine.name)
        self.left = engine.results[records.LEFT : records.LEFT + 1].reshape(())

    def migrate(self, columns: list[Any], to: Any, count: Any, stream: Any) -> Any:
        engine = self._engine
        address, ngoals, nbytes = ints_of(to, "goals")
        if nbytes != 4:
            raise TypeError(f"goals are int32, not {to.dtype}")
        lanes, rows = engine.words.of(columns)
        capacity = min(rows, ngoals)
        if capacity >= _MAX_ROWS:
            raise ValueError(f"arrays have {capacity} rows: a migration takes less than 2^31")
        if not hasattr(count, "__cuda_array_interface__") and not 0 <= index(count) <= capacity:
            raise ValueError(f"count is {count}, of {capacity} rows")
        entered = engine._enter("migrate", [*columns, to], stream)
        result, bound = engine.count_of(count, entered)
        self._reserve(capacity, is_captured=entered[3])
        engine.begin(entered)
        lanes.of[lanes.count] = records.Lane(address, 0, 0, 4, 4)
        select = self._select(lanes, address, bound, capacity)
        keys, kind = dict.fromkeys(engine.places.values(), 0), records.MIGRATION
        take = engine.take(lanes, keys, [capacity], kind, None, result, address)
        call = Repeated([select, take], engine._stream, engine.launcher.where)
        engine.run("migrate", result is count and (columns, to, count), call, entered)
        return result

    def _select(self, lanes: Any, to: int, count: Any, capacity: int) -> driver.Launch:
        """Return the launch that packs what goes, and closes the gaps."""
        engine = self._engine
        most = min(sum(engine.slots.rooms), capacity)
        blocks = max(engine.blocks_for(most, lanes.count), -(-capacity // _ROWS_OF_BLOCK))
        arguments = lanes, to, count, capacity, self._goals, engine.size, engine.rank, self._scratch
        return engine.launch("migrate_rows", blocks, arguments)

    def keep(self, entered: StreamInfo) -> None:
        """Have memory for what is kept, if slots have grown, and for as much as peers may send."""
        engine, slots, before = self._engine, self._engine.slots, self._granted
        granted = slots.largest
        if granted == before:
            return
        unit = 2 * len(slots.scales)  # of one side, in slots
        kept = self._take(2 * granted * unit * slots.slot)
        for side in range(2 if before else 0):
            old, new = (
                slots.columns_at(at + side * scale * unit * slots.slot, scale * unit)
                for at, scale in ((int(slots.table["kept"][0]), before), (kept, granted))
            )
            for column, begin, to in zip(engine.form.columns, old, new, strict=True):
                nbytes = before * unit * engine.form.room * column.nbytes
                engine._backend.copy(to, begin, nbytes, entered[0])
        slots.table["kept"], slots.table["most"] = kept, granted * engine.form.room
        self._granted, slots.is_changed = granted, True

    def _reserve(self, capacity: int, *, is_captured: bool) -> None:
        """Have scratch memory for so many rows; that of before may be in use until the end."""
        if capacity <= self._capacity:
            return
        if is_captured:
            raise UnsupportedError(
                f"{self._engine.name}: migrate failed: its first call with arrays of {capacity} "
                "rows allocates memory, which cannot be captured into a graph. Call it once before"
            )
        capacity = max(_LEAST_ROWS, capacity, min(2 * self._capacity, capacity + (1 << 20)))
        row = 4 * -(-capacity // 64) * 64
        scratch, words = self._scratch, self._take(3 * row)
        scratch.listed, scratch.gone, scratch.goes_to = words, words + row, words + 2 * row
        scratch.shifted = self._take(4 * row) if self._stable else 0
        self._capacity = capacity

    def _take(self, nbytes: int) -> int:
        return int(self._engine.slots.take(nbytes).address)

    def stuck(self) -> tuple[dict[Any, int], int, int]:
        found = self._engine.fetch("check")
        of_keys = found[records.STUCK :]
        keys = enumerate(self._engine.form.keys)
        stuck = {key.name: of_keys[at] for at, key in keys if of_keys[at]}
        return stuck, found[records.STRANGERS], found[records.KEPT]

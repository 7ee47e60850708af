"""Rows that go to the ranks that an array names, out of columns in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.plans.layout import as_numpy, require_writeable
from mpishare.rows.host import count_of, store_count
from mpishare.rows.slots import views_of

if TYPE_CHECKING:
    from mpishare.rows.host import HostRows

    Array = np.ndarray[Any, Any]

DROPPED = -1


class HostMigration:
    """Moves rows out of arrays with spare rows and into them, as `CudaMigration`.

    What came into full arrays is kept until the next call.
    """

    def __init__(self, engine: HostRows, *, stable: bool) -> None:
        self._engine, self._stable = engine, stable
        self.left = np.array(0, np.int64)
        self._kept = self._nothing = views_of(engine.form, None, 0)
        self._strangers = 0
        keys = reversed([*enumerate(engine.form.keys)])  # a rank's first key counts
        # Rows of its own are home.
        self._place_of = {key.rank: at for at, key in keys if key.rank != engine.rank}

    def migrate(self, columns: list[Any], to: Any, count: Any, stream: Any) -> Any:
        """Move the rows, and return the new count."""
        engine, n = self._engine, count_of(count)
        arrays, shortest, _ = engine.require(columns, stream)
        goals = as_numpy(to, "to")
        if goals.dtype != np.int32 or goals.ndim != 1:
            raise TypeError(
                f"to must be of int32 along one axis, not {goals.dtype}{[*goals.shape]}: "
                "to.astype('i4')"
            )
        require_writeable(goals, "to")
        capacity = min(shortest, len(goals))
        if n > capacity:
            raise ValueError(f"count is {n}, of {capacity} rows")
        away = np.flatnonzero(goals[:n] != engine.rank)
        parts, gone = self._select(goals[away], away)
        with engine.agreement.blocked(f"{engine.name}: migrate"):
            engine.send(arrays, parts, shortest)
            left = n - len(gone)
            self._close_gaps(arrays, goals, gone, left)
            engine.receive()
            return store_count(count, self._settle(arrays, goals, left, capacity))

    def _select(self, goals: Array, away: Array) -> tuple[list[Any], Array]:
        leaves, nothing = goals == DROPPED, np.empty(0, np.int64)
        found = [nothing] * len(self._engine.form.keys)
        for rank, place in self._place_of.items():
            goes = goals == rank
            leaves |= goes
            found[place] = away[goes]
        self._strangers = len(away) - int(np.count_nonzero(leaves))
        return [(each, len(each)) for each in found], away[leaves]

    def _close_gaps(self, arrays: list[Array], goals: Array, gone: Array, count: int) -> None:
        """Move the rows that stay to the first `count` places."""
        if not len(gone):
            return
        total, begin = count + len(gone), int(gone[0]) if self._stable else count
        stays = np.ones(total - begin, bool)
        stays[gone[np.searchsorted(gone, begin) :] - begin] = False
        movers = begin + np.flatnonzero(stays)
        if self._stable:
            self._engine.move(arrays, begin, arrays, movers, len(movers), total)
            goals[begin:count] = goals[movers]
            return
        movers = movers[::-1].copy()
        self._engine.move(arrays, gone, arrays, movers, len(movers), total)
        goals[gone[: len(movers)]] = goals[movers]

    def _settle(self, arrays: list[Array], goals: Array, count: int, capacity: int) -> int:
        """Append what was kept, then what came; keep what has no room."""
        engine, kept, first = self._engine, [], count
        for rows in (self._kept, *map(engine.received, range(len(engine.form.keys)))):
            fits = min(len(rows[0]), capacity - count)
            if fits:
                engine.move(arrays, count, rows, 0, fits, 0)
                count += fits
            if fits < len(rows[0]):
                kept.append([column[fits:] for column in rows])
        goals[first:count] = engine.rank
        self._kept = [*map(np.concatenate, zip(*kept, strict=True))] if kept else self._nothing
        self.left[...] = self._strangers + len(self._kept[0])
        return count

    def stuck(self) -> tuple[dict[Any, int], int, int]:
        """Return the rows left by key, those for no peer, and those kept; host-blocking."""
        return {}, self._strangers, len(self._kept[0])

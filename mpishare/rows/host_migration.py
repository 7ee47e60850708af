"""Rows that go to the ranks that an array names, out of columns in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.plans.layout import as_numpy, require_writeable
from mpishare.rows.host import count_of, store_count
from mpishare.rows.messages import UnderWay
from mpishare.rows.slots import views_of

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        self._kept = views_of(engine.form, None, 0)
        self._strangers = 0
        self._place_of: dict[int, int] = {}
        for place, key in enumerate(engine.form.keys):
            self._place_of.setdefault(key.rank, place)
        self._place_of.pop(engine.rank, None)  # rows of its own are home

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
        engine.send(arrays, parts, shortest)

        with UnderWay(engine, "migrate"):
            left = n - len(gone)
            self._close_gaps([*arrays, goals], gone, left)
            engine.receive()
            return store_count(count, self._settle(arrays, goals, left, capacity))

    def _select(self, goals: Array, away: Array) -> tuple[list[Any], Array]:
        """Return the rows for each key, and all that leave, upwards."""
        leaves, nothing = goals == DROPPED, np.empty(0, np.int64)
        found = [nothing] * len(self._engine.form.keys)
        for rank, place in self._place_of.items():
            goes = goals == rank
            leaves |= goes
            found[place] = away[goes]
        self._strangers = len(away) - int(np.count_nonzero(leaves))
        return [(0, len(each), each) for each in found], away[leaves]

    def _close_gaps(self, arrays: Sequence[Array], gone: Array, count: int) -> None:
        """Move the rows that stay to the first `count` places."""
        if not len(gone):
            return
        total = count + len(gone)
        if self._stable:
            first = int(gone[0])
            stays = np.ones(total - first, bool)
            stays[gone - first] = False
            for array in arrays:
                array[first:count] = array[first:total][stays]
            return
        split = int(np.searchsorted(gone, count))
        stays = np.ones(len(gone), bool)  # of the last places
        stays[gone[split:] - count] = False
        movers = count + np.flatnonzero(stays)[::-1]
        for array in arrays:
            array[gone[:split]] = array[movers]

    def _settle(self, arrays: Sequence[Array], goals: Array, count: int, capacity: int) -> int:
        """Append what was kept, then what came; keep what has no room."""
        form = self._engine.form
        came = [self._kept, *(self._engine.received(at) for at in range(len(form.keys)))]
        kept = []
        for rows in came:
            fits = min(len(rows[0]), capacity - count)
            for array, column in zip(arrays, rows, strict=True):
                array[count : count + fits] = column[:fits]
            kept.append([column[fits:] for column in rows])
            goals[count : count + fits] = self._engine.rank
            count += fits
        self._kept = [np.concatenate(each) for each in zip(*kept, strict=True)]
        self.left[...] = self._strangers + len(self._kept[0])
        return count

    def stuck(self) -> tuple[dict[Any, int], int, int]:
        """Return the rows left by key, those for no peer, and those kept; host-blocking."""
        return {}, self._strangers, self.kept()

    def kept(self) -> int:
        """Return how many rows wait for longer arrays; host-blocking."""
        return len(self._kept[0])

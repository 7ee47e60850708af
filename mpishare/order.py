"""Writes to counters and waits for them: on a stream, or by the host itself."""

from __future__ import annotations

from os import sched_yield
from typing import TYPE_CHECKING, Any

from mpishare.chain import Chain
from mpishare.counters import NO_COUNTERS
from mpishare.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.backends import Signals
    from mpishare.counters import Counters
    from mpishare.ground import Ground

LOOKS = 400
"""After so many looks at its counters a call waits in the way that watches deadlines."""

Pairs = tuple[tuple[int, int], ...]
"""Ranks, each with the place of the counter between it and this rank."""


class Ordered:
    """An object whose calls write counters and wait for them.

    Parameters
    ----------
    ground : Ground
        What the object stands on.
    counters : Counters
        Its counters, zeroed.
    name : str
        The object's, for errors and warnings.
    """

    def __init__(self, ground: Ground, counters: Counters, name: str) -> None:
        self.name = name
        self.counters = counters
        self._check: Callable[[], None] = ground.agreement.check
        self._wait_on_host = ground.agreement.wait
        self._rank_of = ground.rank_of
        self._backend = ground.backend
        self._rank, self._size = ground.rank, ground.size
        self._view = counters.view
        self._sync = ground.agreement.block.sync
        self._has_streams = ground.backend.has_streams
        self._patience = ground.patience
        self._chain = Chain(ground.backend, name)

    def _raise_counters(
        self, call: str, stream: Any, pairs: Pairs, counts: list[int], signals: dict[str, Signals]
    ) -> None:
        """Raise my counter towards each rank of `pairs` to one more than was counted so far."""
        values = [counts[rank] + 1 for rank, _ in pairs]
        if self._has_streams:
            number = self._chain.enter(call, stream)
            if pairs:
                if call not in signals:
                    signals[call] = self._prepare([("write", slot) for _, slot in pairs])
                signals[call].enqueue(number, values)
                self._chain.leave()
        else:
            self._sync()
            for (_, slot), value in zip(pairs, values, strict=True):
                self._view[slot] = value
        for rank, _ in pairs:
            counts[rank] += 1

    def _await_counters(
        self, call: str, stream: Any, pairs: Pairs, counts: list[int], signals: dict[str, Signals]
    ) -> None:
        """Wait until each rank of `pairs` has raised its counter once more than was counted."""
        if self._has_streams:
            number = self._chain.enter(call, stream)
            if pairs:
                if call not in signals:
                    signals[call] = self._prepare([("wait", slot) for _, slot in pairs])
                signals[call].enqueue(number, [counts[rank] + 1 for rank, _ in pairs])
                self._chain.leave()
        else:
            self._look_at_counters(call, pairs, counts)
        for rank, _ in pairs:
            counts[rank] += 1

    def _look_at_counters(self, call: str, pairs: Pairs, counts: list[int]) -> None:
        view, looks = self._view, 0
        for rank, slot in pairs:
            value = counts[rank] + 1
            while view[slot] < value:
                looks += 1
                if looks > LOOKS:
                    self._wait(call, lambda: [r for r, s in pairs if view[s] <= counts[r]])
                elif not looks % self._patience:
                    sched_yield()
        self._sync()

    def _wait(self, call: str, lagging: Callable[[], list[int]]) -> None:
        self._wait_on_host(f"{self.name}: {call}", lagging)

    def _prepare(self, operations: Sequence[tuple[str, int]]) -> Signals:
        address = self.counters.address
        return self._backend.signals([(kind, address + 8 * slot) for kind, slot in operations])

    def _end(self) -> None:
        """Let go of the counters: every later call raises `ClosedError`."""
        name = self.name

        def refuse() -> None:
            raise ClosedError(f"{name} is closed")

        self._check = refuse
        # Else a closed object that is still held would keep the control block mapped.
        self.counters = NO_COUNTERS
        self._view = NO_COUNTERS.view
        self._chain.end()

"""Writes to counters and waits for them: on a stream, or by the host itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishare.chain import Chain
from mpishare.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.backends import Signals
    from mpishare.control import Counters
    from mpishare.ground import Ground


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
        self._backend = ground.backend
        self._rank, self._size = ground.rank, ground.size
        self._view = counters.view
        self._sync = ground.agreement.block.sync
        self._has_streams = ground.backend.has_streams
        self._chain = Chain(ground.backend, name)
        self._signals: dict[Any, Signals] = {}

    def _apply(
        self,
        call: str,
        stream: Any,
        ranks: tuple[int, ...],
        *,
        writes: Sequence[tuple[int, int]] = (),
        waits: Sequence[tuple[int, int, int]] = (),
    ) -> None:
        if not self._has_streams:
            self._sync()
            for slot, value in writes:
                self._view[slot] = value
            self._wait_for(call, waits)
            return
        number = self._chain.enter(call, stream)
        if not ranks:
            return
        signals = self._signals.get((call, ranks))
        if signals is None:
            operations = [("write", slot) for slot, _ in writes]
            operations += [("wait", slot) for slot, _, _ in waits]
            signals = self._prepare((call, ranks), operations)
        signals.enqueue(number, [item[1] for item in (*writes, *waits)])

    def _wait_for(self, call: str, waits: Sequence[tuple[int, int, int]]) -> None:
        view = self._view
        if waits:
            self._wait(call, lambda: [rank for slot, value, rank in waits if view[slot] < value])
        self._sync()

    def _wait(self, call: str, lagging: Callable[[], list[int]]) -> None:
        self._wait_on_host(f"{self.name}: {call}", lagging)

    def _prepare(self, key: Any, operations: Sequence[tuple[str, int]]) -> Signals:
        address = self.counters.address
        signals = self._backend.signals([(kind, address + 8 * slot) for kind, slot in operations])
        self._signals[key] = signals
        return signals

    def _end(self) -> None:
        """Let go of the counters: every later call raises `ClosedError`."""
        name = self.name

        def refuse() -> None:
            raise ClosedError(f"{name} is closed")

        self._check = refuse
        self._signals.clear()
        self._chain.end()

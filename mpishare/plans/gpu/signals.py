"""Binary flags between the streams of two ranks, for kernels that never wait.

The rank that waits for a flag resets it to 0. There are no counters, so that a captured graph can
replay the same operations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.backends import Backend


class Operation(NamedTuple):
    kind: str  # "write" or "wait"
    address: int
    value: int


class Signals:
    """Stream memory operations, in order, with constant values."""

    def __init__(self, backend: Backend, operations: Sequence[Operation]) -> None:
        self._values = [each.value for each in operations]
        self._signals = backend.signals([(each.kind, each.address) for each in operations])

    def enqueue(self, stream: int) -> None:
        if self._values:
            self._signals.enqueue(stream, self._values)


def set_flags(addresses: Sequence[int]) -> list[Operation]:
    return [Operation("write", address, 1) for address in addresses]


def wait_and_reset(addresses: Sequence[int]) -> list[Operation]:
    return [
        each
        for address in addresses
        for each in (Operation("wait", address, 1), Operation("write", address, 0))
    ]

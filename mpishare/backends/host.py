"""The host backend: NumPy on shared memory. Calls block, so there is nothing for a stream to do."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.memory import shared

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.backends import Device, Memory, Signals
    from mpishare.memory.shared import SharedMemory


class HostMemory:
    """Shared host memory as one rank maps it."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory: SharedMemory | None = memory
        self._whole: Callable[[], np.ndarray[Any, Any] | None] = lambda: None
        self.nbytes = memory.nbytes
        self.address = memory.address

    @property
    def is_held(self) -> bool:
        """Whether arrays of it are alive."""
        return self._whole() is not None

    def array(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
        """Return the first bytes as an array; it keeps the mapping alive."""
        if self._memory is None:
            raise ValueError("the memory is closed")
        # Not on the mapping itself: an array made on that does not keep it from being unmapped
        # under it. One made by frombuffer does, and is the base of all that are made on it.
        whole = self._whole()
        if whole is None:
            whole = np.frombuffer(self._memory.buffer, dtype=np.uint8)
            self._whole = weakref.ref(whole)
        return np.ndarray(shape, dtype=dtype, buffer=whole)

    def publish(self) -> str:
        """Give the memory a name."""
        if self._memory is None:
            raise ValueError("the memory is closed")
        name = shared.publish(self._memory)
        self._memory.close_file()  # one descriptor a window is enough: the mapping has its own
        return name

    def close(self) -> bool:
        """Unmap; where arrays are alive the memory goes with the last of them."""
        if self._memory is not None:
            self._memory.close_file()
            if not self.is_held:
                self._memory.close()
        self._memory = None
        return True


class HostBackend:
    """Memory in /dev/shm; order by the counters of the control block, looked at by the host."""

    name = "host"
    has_streams = False
    xp = np
    device: Device | None = None

    def allocate(self, nbytes: int) -> HostMemory:
        """Reserve shared memory."""
        return HostMemory(shared.create(nbytes))

    def publish(self, memory: Memory) -> str:
        """Give it a name."""
        if not isinstance(memory, HostMemory):
            raise TypeError(f"{memory!r} is no memory of this backend")
        return memory.publish()

    def open(self, token: str, nbytes: int, uuid: str) -> HostMemory:  # noqa: ARG002  no GPU
        """Map what another rank reserved."""
        memory = shared.attach(token, nbytes)
        memory.close_file()
        return HostMemory(memory)

    def settle(self, token: str) -> None:
        """Take the name away."""
        shared.forget(token)

    def register(self, memory: SharedMemory) -> int:  # noqa: ARG002  no GPU
        """Return 0: there is no GPU that could see it."""
        return 0

    def unregister(self, memory: SharedMemory) -> None:
        """Nothing to undo."""

    def stream(self, stream: Any) -> tuple[int, Any]:  # noqa: ARG002  no streams
        """Return stream 0: streams are ignored here."""
        return 0, None

    def enter(self, stream: Any, name: str, call: str) -> tuple[int, Any, bool]:  # noqa: ARG002
        """Return stream 0: there is nothing to order, since calls block."""
        return 0, None, True

    def is_current(self, stream: int) -> bool:  # noqa: ARG002  no streams
        """Return True: there is no other."""
        return True

    def local_event(self) -> Any:
        """Return a place without an event."""
        return None

    def signals(self, operations: Sequence[tuple[str, int]]) -> Signals:
        """Refuse: the host looks at counters itself."""
        raise NotImplementedError

    def events(self, count: int) -> tuple[list[Any], list[str]]:
        """Return places without events: the counts alone order calls that block."""
        return [None] * count, [""] * count

    def open_events(self, tokens: Sequence[str]) -> list[Any]:
        """Return as many places."""
        return [None] * len(tokens)

    def close_events(self, events: Sequence[Any]) -> None:
        """Nothing to destroy."""

    def record(self, event: Any, stream: int) -> None:
        """Nothing to record: the count that the owner raises next is the record."""

    def wait_event(self, event: Any, stream: int) -> None:
        """Nothing to wait for: the count was seen."""

    def is_capturing(self, stream: int) -> bool:  # noqa: ARG002  no streams
        """Return False."""
        return False

    def is_event_done(self, event: Any) -> bool:  # noqa: ARG002  calls block
        """Return True."""
        return True

    def is_done(self, stream: int) -> bool:  # noqa: ARG002  calls block
        """Return True."""
        return True

    def drain(self, timeout_s: float) -> bool:  # noqa: ARG002  calls block
        """Return True."""
        return True

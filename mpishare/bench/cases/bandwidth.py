"""Case ``bandwidth``: copies from private memory into a rank's own and its neighbor's segment.

All ranks copy at the same time. The rival is a bare copy: on CUDA `cudaMemcpyAsync` from device to
device between the same GPUs, on the host NumPy's copy from private to private memory.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from mpishare.bench.arm import Arm, Entry
from mpishare.bench.contest import contest, rivals
from mpishare.bench.pattern import Pattern

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.bench.rows import Kind, Row
    from mpishare.bench.session import Session

# cudaMemcpyKind
_DEVICE_TO_DEVICE = 3
#: Messages of memory that a rank takes: the source, the pattern's, the window and the rival's.
_COPIES = 6


def run(session: Session) -> list[Row]:
    """Run the case at every size and return its rows. Collective, host-blocking."""
    rows: list[Row] = []
    for nbytes in session.sizes:
        rows += _run_size(session, nbytes)
    return rows


def _run_size(session: Session, nbytes: int) -> list[Row]:
    private, reason = session.attempt(lambda: _Private(session, nbytes))
    window = None
    if private is not None:
        window, reason = session.attempt(private.allocate_window)

    def entry(name: str, kind: type[_Copy], shift: int, *against: str) -> Entry:
        make: Callable[[], Arm] = Arm
        if private is not None and window is not None:
            make = partial(kind, private, window, shift)
        role: Kind = "own" if against else "rival"
        return Entry(name, make, nbytes, against, role, reason)

    def memcpy() -> list[Entry]:
        if not session.on_cuda:
            return [entry("memcpy", _PrivateCopy, 0)]
        return [entry("memcpy own", _BareCopy, 0), entry("memcpy neighbor", _BareCopy, 1)]

    entries = [
        entry("own", _Copy, 0, "memcpy", "memcpy own"),
        entry("neighbor", _Copy, 1, "memcpy", "memcpy neighbor"),
        *rivals(session, "bandwidth", {"memcpy": memcpy}),
    ]
    rows = contest(session, "bandwidth", nbytes, entries)
    if window is not None:
        window.close()
    return rows


class _Private:
    """What all arms copy from, and what they check with."""

    def __init__(self, session: Session, nbytes: int) -> None:
        session.require_memory(_COPIES * nbytes)
        self.session = session
        self.node = session.node
        self.words = nbytes // 8
        self.source: Any = self.node.xp.zeros(self.words, "u8")
        self.pattern = Pattern(self.node.xp, self.words)

    def allocate_window(self) -> Any:
        """Make the window that all arms but the private one copy into. Collective."""
        return self.node.allocate_each((self.words,), "u8", fill=0)


class _Copy(Arm):
    """Copy into the segment of the rank `shift` places on, as a user would."""

    def __init__(self, private: _Private, window: Any, shift: int) -> None:
        node = private.node
        self.private = private
        self.window = window
        self.target: Any = window.segment((node.rank + shift) % node.size)
        self.received: Any = window.array
        self._writer = (node.rank - shift) % node.size
        self._copyto = node.xp.copyto

    def step(self) -> None:
        self._copyto(self.target, self.private.source)

    def fill(self, token: int) -> None:
        private = self.private
        private.pattern.fill(private.source, private.node.rank, 0, token)

    def poison(self) -> None:
        self.private.pattern.poison(self.received)

    def count(self, token: int) -> None:
        self.private.pattern.count(self.received, self._writer, 0, token)

    def checked_step(self, token: int) -> None:
        # A timed step has no order between the ranks. Here the segment is free when all have
        # spoiled theirs, and whole when all have written.
        self.fill(token)
        self.window.fence()
        self.step()
        self.window.fence()
        self.count(token)
        self.poison()

    def wrong(self) -> int:
        return self.private.pattern.wrong()

    def close(self) -> None:
        # The window is the case's, and wants no view of it left.
        del self.target, self.received


class _PrivateCopy(_Copy):
    """The host's bare copy: from private to private memory."""

    def __init__(self, private: _Private, window: Any, shift: int) -> None:
        super().__init__(private, window, shift)
        self.target = self.received = private.node.xp.zeros(private.words, "u8")


class _BareCopy(_Copy):
    """The device's bare copy: one call of the CUDA runtime with addresses known beforehand."""

    def __init__(self, private: _Private, window: Any, shift: int) -> None:
        super().__init__(private, window, shift)
        self._memcpy = private.node.xp.cuda.runtime.memcpyAsync
        self._addresses = int(self.target.data.ptr), int(private.source.data.ptr)
        self._nbytes = int(private.source.nbytes)
        self._stream = int(private.session.stream.ptr)

    def step(self) -> None:
        target, source = self._addresses
        self._memcpy(target, source, self._nbytes, _DEVICE_TO_DEVICE, self._stream)

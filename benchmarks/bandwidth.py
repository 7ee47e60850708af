"""Case ``bandwidth``: copies from private memory into a rank's own and its neighbor's segment.

All ranks copy at the same time. The baseline is a bare copy: on CUDA `cudaMemcpyAsync` from device
to device between the same GPUs, on the host NumPy's copy from private to private memory.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.ring import device_copy
from mpishare.bench.check import Pattern
from mpishare.bench.comparison import Comparison, Variant

if TYPE_CHECKING:
    from mpishare.bench.cases import Case
    from mpishare.bench.report import Row
    from mpishare.bench.session import Session


#: Messages of memory of a rank: the source, the pattern's, the window and the baseline's.
_COPIES = 6


def run(session: Session, case: Case) -> list[Row]:
    """Run the case at every size and return its rows. Collective, host-blocking."""
    rows: list[Row] = []
    for nbytes in session.options.sizes(session.node.backend, case.name):
        if not session.fits(case, nbytes, _COPIES * nbytes):
            continue
        memory = _Memory(session, nbytes)
        _, unfit = session.attempt(memory.allocate)
        if unfit is None:
            _, unfit = session.attempt(memory.allocate_window)
        comparison = Comparison(session, case, nbytes=nbytes, sent_nbytes=nbytes, unfit=unfit)
        comparison.add("own", partial(_Copy, memory, 0), against=("memcpy", "memcpy own"))
        comparison.add("neighbor", partial(_Copy, memory, 1), against=("memcpy", "memcpy neighbor"))
        if session.on_cuda:
            own, neighbor = partial(_BareCopy, memory, 0), partial(_BareCopy, memory, 1)
            comparison.add_baselines("memcpy", {"memcpy own": own, "memcpy neighbor": neighbor})
        else:
            comparison.add_baselines("memcpy", {"memcpy": partial(_PrivateCopy, memory, 0)})
        rows += comparison.run()
        if unfit is None:
            memory.window.close()
    return rows


class _Memory:
    """The source and the window that all variants copy between, and the check."""

    def __init__(self, session: Session, nbytes: int) -> None:
        self.session = session
        self.node = session.node
        self.words = nbytes // 8

    def allocate(self) -> None:
        self.source: Any = self.node.xp.zeros(self.words, "u8")
        self.pattern = Pattern(self.node.xp, self.words)

    def allocate_window(self) -> None:
        self.window = self.node.allocate_each((self.words,), "u8", fill=0)


class _Copy(Variant):
    """Copy into the segment of the rank `shift` places on, as a user would."""

    def __init__(self, memory: _Memory, shift: int) -> None:
        node = memory.node
        self.memory = memory
        self.target: Any = memory.window.segment((node.rank + shift) % node.size)
        self.received: Any = memory.window.array
        self._writer = (node.rank - shift) % node.size
        self._copyto = node.xp.copyto

    def step(self) -> None:
        self._copyto(self.target, self.memory.source)

    def fill(self, token: int) -> None:
        self.memory.pattern.fill(self.memory.source, self.memory.node.rank, 0, token)

    def poison(self) -> None:
        self.memory.pattern.poison(self.received)

    def verify(self, token: int) -> None:
        self.memory.pattern.verify(self.received, self._writer, 0, token)

    def checked_step(self, token: int) -> None:
        # A timed step has no order between the ranks. Here the segment is free when all have
        # poisoned theirs, and complete when all have written.
        self.fill(token)
        self.memory.window.fence()
        self.step()
        self.memory.window.fence()
        self.verify(token)
        self.poison()

    def wrong(self) -> int:
        return self.memory.pattern.wrong()

    def close(self) -> None:
        # The case closes the window, which must have no views left.
        del self.target, self.received


class _PrivateCopy(_Copy):
    """The host's bare copy: from private to private memory."""

    def __init__(self, memory: _Memory, shift: int) -> None:
        super().__init__(memory, shift)
        self.target = self.received = memory.node.xp.zeros(memory.words, "u8")


class _BareCopy(_Copy):
    """The device's bare copy: one call of the CUDA runtime with addresses found beforehand."""

    def __init__(self, memory: _Memory, shift: int) -> None:
        super().__init__(memory, shift)
        self._copy = device_copy(memory.session, self.target, memory.source)

    def step(self) -> None:
        self._copy()

"""Case ``bandwidth``: copies from private memory into a rank's own and its neighbor's segment.

All ranks copy at the same time. The baseline is a bare copy: on CUDA `cudaMemcpyAsync` from device
to device between the same GPUs, on the host NumPy's copy from private to private memory.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from mpishare.bench.cases import Case
from mpishare.bench.check import Pattern
from mpishare.bench.comparison import Comparison, Variant
from mpishare.bench.session import Session
from mpishare.bench.staged import copy_call

#: Messages of memory of a rank: the source, the pattern's, the window and the baseline's.
_COPIES = 6
_BARE = {"host": ("memcpy",), "cuda": ("memcpy own", "memcpy neighbor")}


def run(session: Session, case: Case) -> None:
    xp = session.node.xp
    for nbytes in session.sizes(case, _COPIES):
        shape = (nbytes // 8,)
        # No rank may wait for another one that had no memory.
        made, unfit = session.attempt(partial(_source, xp, *shape))
        window = None
        if unfit is None:
            allocate = partial(session.node.allocate_each, shape, "u8", fill=0)
            window, unfit = session.attempt(allocate)
        comparison = Comparison(session, case, nbytes=nbytes, sent_nbytes=nbytes, unfit=unfit)
        make = partial(_Copy, session, made, window)
        comparison.add("own", partial(make, 0), against=("memcpy", "memcpy own"))
        comparison.add("neighbor", partial(make, 1), against=("memcpy", "memcpy neighbor"))
        for shift, name in enumerate(_BARE[session.node.backend]):
            comparison.add_baseline("memcpy", partial(make, shift, is_bare=True), name)
        comparison.run()
        if window is not None:
            window.close()


def _source(xp: Any, words: int) -> tuple[Any, Pattern]:
    return xp.zeros(words, "u8"), Pattern(xp, words)


class _Copy(Variant):
    """Copy into the segment of the rank `shift` places on, as a user would.

    A bare copy is one call of the CUDA runtime with addresses found beforehand; on the host it goes
    to private memory.
    """

    def __init__(
        self, session: Session, made: Any, window: Any, shift: int, *, is_bare: bool = False
    ) -> None:
        node, xp = session.node, session.node.xp
        (self._source, self.check), self._window = made, window
        target, self._received = window.segment((node.rank + shift) % node.size), window.array
        self._rank, self._writer = node.rank, (node.rank - shift) % node.size
        if is_bare and session.on_cuda:
            self.step = copy_call(session, target, self._source)
            return
        if is_bare:
            target = self._received = xp.zeros_like(self._source)
        self.step = partial(xp.copyto, target, self._source)

    def fill(self, token: int) -> None:
        self.check.fill(self._source, self._rank, 0, token)

    def poison(self) -> None:
        self.check.poison(self._received)

    def verify(self, token: int) -> None:
        self.check.verify(self._received, self._writer, 0, token)

    def checked_step(self, token: int) -> None:
        # A timed step has no order between the ranks. Here the segment is free when all have
        # poisoned theirs, and complete when all have written.
        self.fill(token)
        self._window.fence()
        self.step()
        self._window.fence()
        self.verify(token)
        self.poison()

    def close(self) -> None:
        # The case closes the window, which must have no views left.
        del self._received

"""The baseline ``handles`` of the case setup: the least that any plan on CUDA has to do.

That is an allgather of memory handles, and opening those of the neighbors.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from mpishare.bench.comparison import Comparison
from mpishare.bench.report import BASELINE
from mpishare.bench.session import Session
from mpishare.bench.setup import FACE_NBYTES, Make
from mpishare.errors import UnsupportedError

#: Of memory to be opened, and words of it that are checked.
_HANDLE_NBYTES, _CELLS = 2 << 20, 64


def enter_handles(comparison: Comparison, session: Session) -> None:
    make = partial(_Handles, session)
    comparison.add("handles", make, kind=BASELINE, nbytes=FACE_NBYTES)


class _Handles(Make):
    """Opens memory of the neighbors in the ring, which each rank allocated before."""

    def __init__(self, session: Session) -> None:
        super().__init__(session, self.make, self.wrong_handles)
        if session.comm.size > self.node.size:
            raise UnsupportedError("memory handles are for one node")
        self._runtime = self.node.xp.cuda.runtime
        # Not from CuPy's pool: a handle stands for a whole allocation.
        self._address = self._runtime.malloc(_HANDLE_NBYTES)
        self._words(self._address)[:] = self.node.rank
        session.synchronize()

    def _words(self, address: int) -> Any:
        cuda = self.node.xp.cuda
        memory = cuda.UnownedMemory(address, _HANDLE_NBYTES, self)
        return self.node.xp.ndarray((_CELLS,), "u8", cuda.MemoryPointer(memory, 0))

    def make(self) -> Any:
        comm = self.session.comm
        handles = comm.allgather(self._runtime.ipcGetMemHandle(self._address))
        peers = {(comm.rank + step) % comm.size for step in (-1, 1)} - {comm.rank}
        return {peer: self._runtime.ipcOpenMemHandle(handles[peer]) for peer in peers}

    def wrong_handles(self, made: Any) -> int:
        return sum(int((self._words(made[peer]) != peer).sum()) for peer in made)

    def free(self, made: Any) -> None:
        for address in made.values():
            self._runtime.ipcCloseMemHandle(address)

    def close(self) -> None:
        # After all have closed what they opened.
        self.session.comm.Barrier()
        self._runtime.free(self._address)

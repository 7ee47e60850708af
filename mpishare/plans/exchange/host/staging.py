"""Shared host memory of one plan: per rank, control words and two staging buffers.

In each epoch a sender packs its cells and announces them (`READY`); each receiver copies them and
counts them as consumed (`CONSUMED`). Two buffers, used in turn by the parity of the epoch, let a
sender run two epochs ahead before it waits for a slow receiver. Large faces are also read where
they are, in a window or in the sender's process: such fields may be overwritten after `wait`, which
therefore waits for all of their readers.

The control words of a rank are written by that rank alone::

    READY      the last epoch in which its cells can be read
    CONSUMED   the last epoch in which it has copied the cells of all senders
    2 tables   of the addresses of its fields, for even epochs and for odd ones: 0 where all are
               staged, then a `Location` per field
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpishare.coordination.counters import SLOT_NBYTES, SLOT_WORDS, whole_slots
from mpishare.memory.memory import compact_strides
from mpishare.plans.message import cells_of, padded, parts_sent
from mpishare.runtime.context import Location
from mpishare.runtime.route import HOST

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Sequence

    from mpishare.plans.engine import RoutedSetup
    from mpishare.plans.exchange.host.route import Array
    from mpishare.plans.message import PartKey

READY, CONSUMED = 0, SLOT_WORDS
_TABLES = 2 * SLOT_WORDS


# In place of the number of a window: a field in staging, and one in the process of its owner, where
# the offset is its address.
STAGED, IN_PROCESS = 0, 1 << 63
_ENTRY_WORDS = len(Location._fields)


def table_offset(parity: int, nfields: int) -> int:
    """Return where the address table of a parity begins in the control words."""
    return _TABLES + parity * (1 + _ENTRY_WORDS * nfields)


class Staging:
    """The shared memory of the plan's ranks on this node. Collective to make.

    `unstaged` are parts that need no buffers, `control` the control words of each rank, with room
    for `nfields` fields, and `nbytes` those of all ranks, since the memory is there once per node.
    """

    def __init__(self, setup: RoutedSetup, unstaged: Collection[PartKey]) -> None:
        self._comm = setup.comm
        self.unstaged = unstaged
        self._call = setup.full_call
        self._layouts = setup.layouts
        ranks_here = setup.comm.ranks_here
        self.nfields = max(map(len, setup.layouts))
        nbytes = 8 * whole_slots(table_offset(2, self.nfields))
        end = nbytes * len(ranks_here)
        self._offsets: dict[PartKey, int] = {}  # in the buffer of even epochs
        self._strides: dict[int, int] = {}  # per sender, from that buffer to the other one
        for rank in ranks_here:
            begin = end
            packed: dict[Hashable, int] = {}  # the same cells once, whoever receives them
            for key, part in parts_sent(setup.sends, (rank,), HOST):
                if key.receiver != rank and key not in unstaged:
                    at = packed.setdefault(cells_of(key, part), end)
                    self._offsets[key] = at
                    if at == end:
                        end += padded(part.nbytes, SLOT_NBYTES)
            self._strides[rank] = end - begin
            end += end - begin
        self._memory = setup.comm.take_memory(setup.name, end)
        self.nbytes = self._memory.nbytes
        whole = self._memory.buffer
        self.control: dict[int, memoryview[int]] = {
            rank: whole[nbytes * place : nbytes * (place + 1)].cast("Q")
            for place, rank in enumerate(ranks_here)
        }

    def buffers(self, key: PartKey, shape: tuple[int, ...]) -> tuple[Array, Array] | None:
        """Return the packed cells of a part in even and in odd epochs; None if it has none.

        Their axes lie in memory in the order of the sender's, so that it packs without transposing.
        """
        offset = self._offsets.get(key)
        if offset is None:
            return None
        base = np.frombuffer(self._memory.buffer, dtype=np.uint8)
        layout = self._layouts[key.sender][key.field]
        fastest_last = sorted(range(len(shape)), key=layout.strides.__getitem__)[::-1]
        strides = compact_strides(shape, layout.dtype.itemsize, fastest_last)
        even, odd = (
            np.ndarray(shape, layout.carrier, base, at, strides)
            for at in (offset, offset + self._strides[key.sender])
        )
        return even, odd

    def wait_until(self, ranks: Sequence[int], word: int, epoch: int) -> None:
        self.wait_for(lambda: [rank for rank in ranks if self.control[rank][word] < epoch])

    def wait_for(self, pending: Callable[[], Sequence[int]]) -> None:
        """Wait until no rank is pending, with the deadline; raise if one of them is gone."""
        self._comm.wait(self._call, pending)

    def close(self) -> None:
        self.control = {}
        self._memory.close()

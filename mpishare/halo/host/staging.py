"""Shared host memory of one plan: per rank, control words and two staging buffers.

The control words of a rank are written by that rank alone::

    READY      the last epoch in which its cells can be read
    CONSUMED   the last epoch in which it has copied the cells of all senders
    2 tables   of the addresses of its fields, for even epochs and for odd ones: a version, then
               a `FieldAddress` per field. The same version means the same addresses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpishare.coordination.counters import SLOT_WORDS
from mpishare.plans.message import parts_sent

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from mpishare.halo.host.copies import Array
    from mpishare.plans.engine import RoutedSetup
    from mpishare.plans.message import MessageInfo, PartKey

READY, CONSUMED = 0, SLOT_WORDS
_TABLES = 2 * SLOT_WORDS
_ALIGN = 128  # staged cells of two ranks never share a cache line


class FieldAddress(NamedTuple):
    """Where receivers find a field: in a window, in the process of its owner, or in staging."""

    window: int  # its number, `STAGED` or `IN_PROCESS`
    segment: int  # of the window, by the rank in the node
    offset: int  # in the segment, in bytes; the address, if it is in the process of its owner

    @property
    def is_in_window(self) -> bool:
        """Whether it is in a window."""
        return self.window not in (STAGED, IN_PROCESS)


STAGED, IN_PROCESS = 0, 1 << 63
IN_STAGING = FieldAddress(STAGED, 0, 0)
ONCE = 1 << 63
"""A flag of versions: the fields were new, and in no window. What is bound to them is not kept."""
_ENTRY_WORDS = len(IN_STAGING)


def table_offset(parity: int, nfields: int) -> int:
    """Return where the address table of a parity begins in the control words, with its version."""
    return _TABLES + parity * (1 + _ENTRY_WORDS * nfields)


def write_table(control: memoryview[int], table: int, version: int, entries: Sequence[int]) -> None:
    """Write the words of all field addresses, then their version."""
    for at, word in enumerate(entries, table + 1):
        control[at] = word
    control[table] = version


def set_entry(entries: list[int], field: int, address: FieldAddress) -> None:
    """Set the address of one field in the words of all."""
    at = _ENTRY_WORDS * field
    entries[at : at + _ENTRY_WORDS] = address


def read_entry(control: memoryview[int], table: int, field: int) -> FieldAddress:
    """Return the address of one field."""
    at = table + 1 + _ENTRY_WORDS * field
    return FieldAddress(*control[at : at + _ENTRY_WORDS])


class DoubleBuffer:
    """The shared memory of the plan's ranks on this node. Collective to make.

    Parameters
    ----------
    setup : RoutedSetup
        The plan's.
    messages : sequence of sequence of MessageInfo
        What each rank of the plan sends.
    unstaged : collection of PartKey
        Parts that need no buffers.

    Attributes
    ----------
    control : dict of int to memoryview
        The control words of each rank.
    nbytes : int, bytes
        Of all ranks: it is there once per node.
    """

    def __init__(
        self,
        setup: RoutedSetup,
        messages: Sequence[Sequence[MessageInfo]],
        unstaged: Collection[PartKey],
    ) -> None:
        self._layouts = setup.layouts
        ranks_here = setup.comm.ranks_here
        nbytes = 8 * -(-table_offset(2, len(setup.mine)) // SLOT_WORDS) * SLOT_WORDS
        end = nbytes * len(ranks_here)
        self._offsets: dict[PartKey, int] = {}  # in the buffer of even epochs
        self._strides: dict[int, int] = {}  # per sender, from that buffer to the other one
        for rank in ranks_here:
            begin = end
            for key, part, _ in parts_sent(messages, (rank,), "host"):
                if key.receiver != rank and key not in unstaged:
                    self._offsets[key] = end
                    end += -(-part.nbytes // _ALIGN) * _ALIGN
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
        strides = [0] * len(shape)
        step = layout.dtype.itemsize
        for axis in sorted(range(len(shape)), key=layout.strides.__getitem__):
            strides[axis] = step
            step *= shape[axis]
        even, odd = (
            np.ndarray(shape, layout.carrier, base, at, strides)
            for at in (offset, offset + self._strides[key.sender])
        )
        return even, odd

    def close(self) -> None:
        """Give the memory back. Local, once no rank uses it."""
        self.control = {}
        self._memory.close()

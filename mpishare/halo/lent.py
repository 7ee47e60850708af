"""Cells that are lent: the receiver reads them out of the memory of the sender's process.

Where Linux lets it (`process_vm_readv(2)`: of the same user, unless Yama or a container forbids
it), a large face of a field that is in no window is copied once instead of twice, and takes no
memory that is shared. The second copy costs more than its bytes: each cache line goes from core to
core twice, 23 ns every time where a line that nobody else holds takes 3.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import secrets
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.control import State
from mpishare.errors import MpiShareError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.geometry import Box
    from mpishare.halo.layout import Layout
    from mpishare.halo.message import Message
    from mpishare.halo.moves import Array, Move
    from mpishare.halo.ranks import Ranks

_WORTH_NBYTES = 64 << 10  # below, two copies cost less than the call and the wait for readers
_SPREAD = 1.25  # from the first cell to the last, over the bytes of the cells: what is read for it
_BLOCK_NBYTES = 256 << 10  # read at once, to be copied from there while the cache has it
_TOKEN_NBYTES = 16

Key = tuple[int, int, int, int]
"""Sender, receiver, tag and field of a part."""

log = logging.getLogger("mpishare.halo")


class _Span(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


@cache
def _readv() -> Callable[..., int]:
    read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    spans = ctypes.POINTER(_Span), ctypes.c_ulong
    read.argtypes = (ctypes.c_int, *spans, *spans, ctypes.c_ulong)
    read.restype = ctypes.c_ssize_t
    found: Callable[..., int] = read
    return found


def reading(pid: int, of: int, to: int, nbytes: int) -> Callable[[], int]:
    """Return what copies bytes of another process to an address of this one. Local.

    What is returned returns 0, or the number of the error.
    """
    read, remote, local = _readv(), _Span(of, nbytes), _Span(to, nbytes)

    def call() -> int:
        got = read(pid, local, 1, remote, 1, 0)
        if got == nbytes:
            return 0
        if got <= 0:
            return ctypes.get_errno()
        # At most 2 GiB come at once, and only what is before a page that is not there.
        return reading(pid, of + got, to + got, nbytes - got)()

    return call


@dataclass(frozen=True)
class _Read:
    """What one call of the system brings.

    Attributes
    ----------
    offset, nbytes : int, bytes
        Where it begins in the sender's field, and how much it is.
    key : tuple of slice
        Where its cells belong in the receiver's field.
    strides : tuple of int or None, bytes
        Between the cells as they come; None where they come as they belong.
    """

    offset: int
    nbytes: int
    key: tuple[slice, ...]
    strides: tuple[int, ...] | None


class Lent:
    """Which parts of a plan's messages are read where they are. Collective to make, host-blocking.

    Parameters
    ----------
    ranks : Ranks
        The plan's.
    name : str
        The plan's, for errors.
    layouts : sequence of list of Layout
        For each rank of the plan, its fields'.
    told : sequence
        For each rank of the plan, `Message.as_data` of what it sends, and the route.
    recvs : sequence of Message
        What this rank receives.

    Attributes
    ----------
    keys : frozenset of Key
        The parts, the same on all ranks.
    nbytes : int, bytes
        Of this rank's memory, through which cells come that do not belong as they come.
    """

    def __init__(
        self,
        ranks: Ranks,
        name: str,
        layouts: Sequence[Sequence[Layout]],
        told: Sequence[Any],
        recvs: Sequence[Message],
    ) -> None:
        self._ranks = ranks
        self._name = name
        self._pids: list[int] = []
        boxes = {
            (sender, receiver, tag, field): box
            for sender, messages in enumerate(told)
            for receiver, tag, parts, route in messages
            for field, nbytes, box in (parts if route == "host" and receiver != sender else ())
            if nbytes >= _WORTH_NBYTES
            and box is not None
            and _span(layouts[sender][field], *box)[1] <= _SPREAD * nbytes
        }
        readable = self._try({key[:2] for key in boxes}) if boxes else set()
        self.keys = frozenset(key for key in boxes if key[:2] in readable)
        mine = ranks.rank
        self._reads = {
            key: _reads(
                layouts[key[0]][part.field], boxes[key], layouts[mine][part.field], part.box
            )
            for message in recvs
            for part in message.parts
            if (key := (message.peer, mine, message.tag, part.field)) in self.keys
            and part.box is not None  # it is one at both ends
        }
        through = [read.nbytes for reads in self._reads.values() for read in reads if read.strides]
        self._scratch = np.empty(max(through, default=0), np.uint8)
        self.nbytes = self._scratch.nbytes

    def _try(self, pairs: set[tuple[int, int]]) -> set[tuple[int, int]]:
        """Read something of each process that is to be read, and return where that went well."""
        ranks, mine = self._ranks, self._ranks.rank
        token = secrets.token_bytes(_TOKEN_NBYTES)
        held = ctypes.create_string_buffer(token, _TOKEN_NBYTES)  # until all have looked
        found = ctypes.create_string_buffer(_TOKEN_NBYTES)
        told = ranks.step(self._name, lambda: [os.getpid(), ctypes.addressof(held), token.hex()])
        self._pids = [pid for pid, _, _ in told]

        def look() -> list[int]:
            seen = []
            for sender in sorted(sender for sender, receiver in pairs if receiver == mine):
                pid, address, expected = told[sender]
                error = reading(pid, address, ctypes.addressof(found), _TOKEN_NBYTES)()
                if not error and found.raw.hex() == expected:
                    seen.append(sender)
                else:
                    why = os.strerror(error) if error else "another process has its number here"
                    text = "%s: large faces of rank %d are copied twice: its memory is not read: %s"
                    log.info(text, self._name, sender, why)
            return seen

        seen = ranks.step(self._name, look)
        return {(sender, receiver) for receiver, each in enumerate(seen) for sender in each}

    def taking(self, key: Key, address: int, array: Array) -> list[Move]:
        """Return what brings a part into my field from the sender's, which is at that address."""
        moves: list[Move] = []
        for read in self._reads[key]:
            to = array[read.key]
            come = to
            if read.strides is not None:
                come = np.ndarray(to.shape, to.dtype, self._scratch, strides=read.strides)
            at = come.__array_interface__["data"][0]
            call = reading(self._pids[key[0]], address + read.offset, at, read.nbytes)
            moves.append(partial(self._take, key[0], call))
            if come is not to:
                moves.append(partial(to.__setitem__, ..., come))
        return moves

    def _take(self, sender: int, call: Callable[[], int]) -> None:
        """Read, and raise if that was not what the sender had there when it said so."""
        ranks = self._ranks
        agreement = ranks.ground.agreement
        error = call()
        # Asked after it: who leaves says so first, and only then other things may lie there.
        agreement.block.sync()
        if error == errno.ESRCH or agreement.block.state(ranks.team[sender]) != State.PRESENT:
            ranks.wait(f"{self._name}: wait", lambda: [sender])  # raises, with its reasons
        if error:
            text = (
                f"{self._name}: wait failed: cells in a field of rank {sender} cannot be read into "
                f"mine: {os.strerror(error)}"
            )
            raise agreement.lose(lambda: MpiShareError(text), fatal=False)


def _span(layout: Layout, start: Sequence[int], stop: Sequence[int]) -> tuple[int, int]:
    """Return where the cells of a box begin in a field, and how far it is to the last one's end."""
    steps = layout.strides
    first = sum(at * step for at, step in zip(start, steps, strict=True))
    last = sum((end - 1) * step for end, step in zip(stop, steps, strict=True))
    return first, last - first + layout.dtype.itemsize


def _reads(theirs: Layout, source: Sequence[Sequence[int]], mine: Layout, box: Box) -> list[_Read]:
    """Return what brings a box of the sender's field, of the same shape, into that of mine."""
    start, stop = source
    shape, key = box.shape, box.slices()
    offset, nbytes = _span(theirs, start, stop)
    is_like = all(
        extent == 1 or step == other
        for extent, step, other in zip(shape, theirs.strides, mine.strides, strict=True)
    )
    if is_like and nbytes == box.size * theirs.dtype.itemsize:
        return [_Read(offset, nbytes, key, None)]
    # Some planes at a time, along the axis that is the slowest in the sender's memory.
    steps = [step if extent > 1 else 0 for extent, step in zip(shape, theirs.strides, strict=True)]
    axis = steps.index(max(steps))
    planes = max(_BLOCK_NBYTES // max(steps[axis], 1), 1)
    found = []
    for first in range(0, shape[axis], planes):
        last = min(first + planes, shape[axis])
        low, high, to = [*start], [*stop], [*key]
        low[axis], high[axis] = start[axis] + first, start[axis] + last
        to[axis] = slice(box.start[axis] + first, box.start[axis] + last)
        found.append(_Read(*_span(theirs, low, high), tuple(to), theirs.strides))
    return found

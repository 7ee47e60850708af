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
import mmap
import os
import secrets
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.errors import MpiShareError
from mpishare.halo.geometry import Box

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mpishare.halo.host.copies import Array, Move
    from mpishare.halo.layout import Layout
    from mpishare.halo.message import Message
    from mpishare.halo.plan_comm import PlanComm

_WORTH_NBYTES = 64 << 10  # below, two copies cost less than the call and the wait for readers
_SPREAD = 1.25  # from the first cell to the last, over the bytes of the cells: what is read for it
_BLOCK_NBYTES = 256 << 10  # read at once, to be copied from there while the cache has it
_TOKEN_NBYTES = 16
_MOST_SPANS = 1024  # in one call (IOV_MAX)

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
            return ctypes.get_errno() or errno.EFAULT
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


class PeerReads:
    """Which parts of a plan's messages are read where they are. Collective to make, host-blocking.

    Parameters
    ----------
    ranks : PlanComm
        The plan's.
    name : str
        The plan's, for errors.
    layouts : sequence of list of Layout
        For each rank of the plan, its fields'.
    told : sequence
        For each rank of the plan, `Message.as_data` of what it sends, and the route.

    Attributes
    ----------
    keys : frozenset of Key
        The parts, the same on all ranks.
    fields : frozenset of int
        Those of this rank that have such parts.
    """

    def __init__(
        self, ranks: PlanComm, name: str, layouts: Sequence[Sequence[Layout]], told: Sequence[Any]
    ) -> None:
        self._ranks = ranks
        self._name = name
        self._layouts = layouts
        self._pids: list[int] = []
        self._boxes = {
            (sender, receiver, tag, field): box
            for sender, messages in enumerate(told)
            for receiver, tag, parts, route in messages
            for field, nbytes, box in (parts if route == "host" and receiver != sender else ())
            if nbytes >= _WORTH_NBYTES
            and box is not None
            and _span(layouts[sender][field], box.start, box.stop)[1] <= _SPREAD * nbytes
        }
        readable = self._try({key[:2] for key in self._boxes}) if self._boxes else set()
        self.keys = frozenset(key for key in self._boxes if key[:2] in readable)
        self.fields = frozenset(field for sender, *_, field in self.keys if sender == ranks.rank)
        self._reads: dict[Key, list[_Read]] = {}
        self._scratch = np.empty(0, np.uint8)
        self._shadows: dict[int, Array] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's memory, through which cells come that do not belong as they come."""
        return self._scratch.nbytes

    def lay_out(self, recvs: Sequence[Message]) -> None:
        """Find out how the parts of these messages are read. Local."""
        mine, layouts = self._ranks.rank, self._layouts
        for message in recvs:
            for part in message.parts:
                key = message.peer, mine, message.tag, part.field
                if key in self.keys and part.box is not None:  # it is one at both ends
                    pair = layouts[message.peer][part.field], layouts[mine][part.field]
                    self._reads[key] = [*_reads(*pair, self._boxes[key], part.box)]
        every = [read for reads in self._reads.values() for read in reads]
        self._scratch = np.empty(max((r.nbytes for r in every if r.strides), default=0), np.uint8)

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

    def place(self, field: int, address: int) -> tuple[int, Array | None]:
        """Return at which address my field at this one is read, and what to copy it to before.

        Nothing where it is read itself. Memory of drivers, as what CUDA has pinned, is not: then
        its parts are copied into a shadow of it, of which only they are ever touched.
        """
        layout, mine = self._layouts[self._ranks.rank][field], self._ranks.rank
        lent = [key for key in self.keys if (key[0], key[3]) == (mine, field)]
        spans = (_span(layout, self._boxes[key].start, self._boxes[key].stop) for key in lent)
        if all(_is_readable(address + offset, nbytes) for offset, nbytes in spans):
            return address, None
        if field not in self._shadows:
            self._shadows[field] = np.ndarray(
                layout.shape, layout.carrier, np.empty(layout.span_nbytes, np.uint8),
                strides=layout.strides,
            )  # fmt: skip
        shadow = self._shadows[field]
        return _address(shadow), shadow

    def taking(self, key: Key, address: int, array: Array) -> list[Move]:
        """Return what brings a part into my field from the sender's, which is at that address."""
        moves: list[Move] = []
        for read in self._reads[key]:
            to = array[read.key]
            come = to
            if read.strides is not None:
                come = np.ndarray(to.shape, to.dtype, self._scratch, strides=read.strides)
            at = address + read.offset
            call = reading(self._pids[key[0]], at, _address(come), read.nbytes)
            moves.append(partial(self._take, key[0], call))
            if come is not to:
                moves.append(partial(to.__setitem__, ..., come))
        return moves

    def _take(self, sender: int, call: Callable[[], int]) -> None:
        """Read, and raise if that went wrong or the sender is gone, which is the reason then.

        Who has left may have freed the cells; of who died another process may have the number.
        """
        ranks = self._ranks
        agreement = ranks.context.agreement
        error = call()
        if error == errno.ESRCH or not agreement.is_here(ranks.ranks_here[sender]):
            ranks.wait(f"{self._name}: wait", lambda: [sender])  # raises, with its reasons
        if error:
            text = (
                f"{self._name}: wait failed: cells in a field of rank {sender} cannot be read into "
                f"mine: {os.strerror(error)}. Fields in windows need no such permission."
            )
            raise agreement.fail_and_tell(lambda: MpiShareError(text), fatal=False)

    def close(self) -> None:
        """Let the memory go. Local."""
        self._reads, self._shadows, self._scratch = {}, {}, np.empty(0, np.uint8)


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _span(layout: Layout, start: Sequence[int], stop: Sequence[int]) -> tuple[int, int]:
    """Return where the cells of a box begin in a field, and how far it is to the last one's end."""
    steps = layout.strides
    first = sum(at * step for at, step in zip(start, steps, strict=True))
    last = sum((end - 1) * step for end, step in zip(stop, steps, strict=True))
    return first, last - first + layout.dtype.itemsize


def _is_readable(address: int, nbytes: int) -> bool:
    """Whether another process could read memory of this one: a byte of each page is tried."""
    end = address + nbytes
    pages = np.append(np.arange(address, end, mmap.PAGESIZE, dtype=np.uint64), np.uint64(end - 1))
    found = np.empty(_MOST_SPANS, np.uint8)
    for first in range(0, pages.size, _MOST_SPANS):
        some = pages[first : first + _MOST_SPANS]
        spans = np.ones((some.size, 2), np.uint64)
        spans[:, 0] = some
        remote = ctypes.cast(_address(spans), ctypes.POINTER(_Span))
        local = _Span(_address(found), some.size)
        if _readv()(os.getpid(), local, 1, remote, some.size, 0) != some.size:
            return False
    return True


def _reads(theirs: Layout, mine: Layout, source: Box, target: Box) -> Iterator[_Read]:
    """Return what brings a box of the sender's field into one of mine, of the same shape."""
    shape, key = target.shape, target.slices()
    offset, nbytes = _span(theirs, source.start, source.stop)
    steps = [step if extent > 1 else 0 for extent, step in zip(shape, theirs.strides, strict=True)]
    own = [step if extent > 1 else 0 for extent, step in zip(shape, mine.strides, strict=True)]
    if steps == own and nbytes == target.size * theirs.dtype.itemsize:
        yield _Read(offset, nbytes, key, None)
    elif nbytes <= _BLOCK_NBYTES or max(steps) == 0:
        yield _Read(offset, nbytes, key, theirs.strides)
    else:  # in pieces, along the axis that is the slowest in the sender's memory
        axis = steps.index(max(steps))
        planes = min(max(_BLOCK_NBYTES // steps[axis], 1), shape[axis] - 1)
        for first in range(0, shape[axis], planes):
            last = min(first + planes, shape[axis])
            yield from _reads(
                theirs, mine, _cut(source, axis, first, last), _cut(target, axis, first, last)
            )


def _cut(box: Box, axis: int, first: int, last: int) -> Box:
    """Return a part of a box, along one of its axes."""
    start, stop = [*box.start], [*box.stop]
    start[axis], stop[axis] = box.start[axis] + first, box.start[axis] + last
    return Box(tuple(start), tuple(stop))

"""Zero-copy reads from a peer process with ``process_vm_readv`` (cross-memory attach, CMA).

Where Linux allows it (the same user, and neither Yama nor a container forbids it), a large face of
a field that is in no window is copied once instead of twice, and takes no shared memory. The second
copy costs more than its bytes: each cache line goes from core to core twice, which takes 23 ns each
time, against 3 ns for a line that no other core holds.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import secrets
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpishare.errors import MpiShareError
from mpishare.halo.geometry import Box
from mpishare.halo.host.copies import address_of
from mpishare.halo.message import PartKey, parts_sent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mpishare.halo.engine import PlanSetup
    from mpishare.halo.host.copies import Array, Copy
    from mpishare.halo.layout import FieldLayout
    from mpishare.halo.message import Message, MessageInfo, PartInfo

_MIN_READ_NBYTES = 64 << 10  # below, two copies cost less than the system call and the wait
_MAX_SPREAD = 1.25  # from the first cell to the end of the last, over the bytes of the cells
_BLOCK_NBYTES = 256 << 10  # read at once, then copied on while it is in the cache
_TOKEN_NBYTES = 16
_IOV_MAX = 1024  # ranges in one system call

log = logging.getLogger("mpishare.halo")


class _IoVec(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


@cache
def _process_vm_readv() -> Callable[..., int]:
    read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    ranges = ctypes.POINTER(_IoVec), ctypes.c_ulong
    read.argtypes = (ctypes.c_int, *ranges, *ranges, ctypes.c_ulong)
    read.restype = ctypes.c_ssize_t
    found: Callable[..., int] = read
    return found


def bind_read(pid: int, source: int, target: int, nbytes: int) -> Callable[[], int]:
    """Return the call that copies bytes from an address of another process to one of this.

    It returns 0, or the error number.
    """
    read, remote, local = _process_vm_readv(), _IoVec(source, nbytes), _IoVec(target, nbytes)

    def call() -> int:
        count = read(pid, local, 1, remote, 1, 0)
        if count == nbytes:
            return 0
        if count <= 0:
            return ctypes.get_errno() or errno.EFAULT
        # One call reads at most 2 GiB, and stops before a page that cannot be read.
        return bind_read(pid, source + count, target + count, nbytes - count)()

    return call


class _Extent(NamedTuple):
    """Bytes of a field, from its start."""

    offset: int
    nbytes: int


class _Block(NamedTuple):
    """What one system call reads."""

    extent: _Extent  # of the sender's field
    key: tuple[slice, ...]  # in the receiver's field
    strides: tuple[int, ...] | None  # of the cells as read; None if the receiver's field has them


class _Reply(NamedTuple):
    """What a rank offers the others to read, to find out whether they can."""

    pid: int
    address: int
    token: str


class PeerReads:
    """The parts of a plan that the receiver reads from the sender's process. Collective to make.

    Parameters
    ----------
    setup : PlanSetup
        The plan's.
    messages : sequence of sequence of MessageInfo
        What each rank of the plan sends; empty if nothing may be read.

    Attributes
    ----------
    keys : frozenset of PartKey
        Those parts, the same on all ranks.
    fields : frozenset of int
        The fields of this rank that have such parts.
    """

    def __init__(self, setup: PlanSetup, messages: Sequence[Sequence[MessageInfo]]) -> None:
        self._comm = comm = setup.comm
        self._name = setup.name
        self._layouts = setup.layouts
        self._pids: list[int] = []
        self._boxes = {
            key: info.box
            for key, info, _ in parts_sent(messages, range(len(messages)), "host")
            if info.box is not None and self._is_worth_reading(key, info)
        }
        readable = self._probe() if self._boxes else set()
        self.keys = frozenset(key for key in self._boxes if (key.sender, key.receiver) in readable)
        self.fields = frozenset(key.field for key in self.keys if key.sender == comm.rank)
        self._blocks: dict[PartKey, list[_Block]] = {}
        self._scratch = np.empty(0, np.uint8)
        self._shadows: dict[int, Array] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer for cells that are rearranged after they are read."""
        return self._scratch.nbytes

    def lay_out(self, recvs: Sequence[Message]) -> None:
        """Cut the parts of these messages into blocks, and allocate the buffer."""
        mine, layouts = self._comm.rank, self._layouts
        for message in recvs:
            for part in message.parts:
                key = PartKey(message.peer, mine, message.tag, part.field)
                if key in self.keys and part.box is not None:  # it is a box at both ends
                    pair = layouts[message.peer][part.field], layouts[mine][part.field]
                    self._blocks[key] = [*_blocks(*pair, self._boxes[key], part.box)]
        blocks = (block for blocks in self._blocks.values() for block in blocks if block.strides)
        nbytes = max((block.extent.nbytes for block in blocks), default=0)
        self._scratch = np.empty(nbytes, np.uint8)

    def shadow(self, field: int, address: int) -> Array | None:
        """Return where to copy my field at this address for its readers; None if they can read it.

        Memory of a driver, such as CUDA's pinned memory, cannot be read from another process. Then
        the parts are copied into an array like it; its other pages are never touched.
        """
        layout = self._layouts[self._comm.rank][field]
        mine = (key for key in self.keys if (key.sender, key.field) == (self._comm.rank, field))
        extents = (_extent(layout, self._boxes[key]) for key in mine)
        if all(_is_readable(address + offset, nbytes) for offset, nbytes in extents):
            return None
        if field not in self._shadows:
            self._shadows[field] = np.ndarray(
                layout.shape, layout.carrier, np.empty(layout.span_nbytes, np.uint8),
                strides=layout.strides,
            )  # fmt: skip
        return self._shadows[field]

    def bind(self, key: PartKey, address: int, array: Array) -> list[Copy]:
        """Return the calls that read a part into my field from the sender's at that address."""
        copies: list[Copy] = []
        for (offset, nbytes), where, strides in self._blocks[key]:
            target = read_into = array[where]
            if strides is not None:
                read_into = np.ndarray(target.shape, target.dtype, self._scratch, strides=strides)
            pid = self._pids[key.sender]
            read = bind_read(pid, address + offset, address_of(read_into), nbytes)
            copies.append(partial(self._read, key.sender, read))
            if read_into is not target:
                copies.append(partial(target.__setitem__, ..., read_into))
        return copies

    def close(self) -> None:
        """Free the memory."""
        self._blocks, self._shadows, self._scratch = {}, {}, np.empty(0, np.uint8)

    def _is_worth_reading(self, key: PartKey, info: PartInfo) -> bool:
        if key.sender == key.receiver or info.box is None or info.nbytes < _MIN_READ_NBYTES:
            return False
        extent = _extent(self._layouts[key.sender][key.field], info.box)
        return extent.nbytes <= _MAX_SPREAD * info.nbytes

    def _probe(self) -> set[tuple[int, int]]:
        """Read a token from each sender; return the pairs (sender, receiver) where that works."""
        comm = self._comm
        senders = sorted({key.sender for key in self._boxes if key.receiver == comm.rank})
        token = secrets.token_bytes(_TOKEN_NBYTES)
        offered = ctypes.create_string_buffer(token, _TOKEN_NBYTES)  # until all have read it
        reply = _Reply(os.getpid(), ctypes.addressof(offered), token.hex())
        replies = [_Reply(*each) for each in comm.step(self._name, lambda: reply)]
        self._pids = [each.pid for each in replies]
        readable = comm.step(self._name, lambda: [s for s in senders if self._can_read(s, replies)])
        return {(sender, receiver) for receiver, each in enumerate(readable) for sender in each}

    def _can_read(self, sender: int, replies: Sequence[_Reply]) -> bool:
        found = ctypes.create_string_buffer(_TOKEN_NBYTES)
        pid, address, token = replies[sender]
        error = bind_read(pid, address, ctypes.addressof(found), _TOKEN_NBYTES)()
        if not error and found.raw.hex() == token:
            return True
        why = os.strerror(error) if error else "here its process id belongs to another process"
        log.info(
            "%s: large faces of rank %d are copied twice, since its memory cannot be read: %s",
            self._name, sender, why,
        )  # fmt: skip
        return False

    def _read(self, sender: int, read: Callable[[], int]) -> None:
        """Read; raise if that failed, or with the sender's own reason if it has left.

        A rank that has left may have freed the cells; if it died, its process id may be reused.
        """
        comm = self._comm
        agreement = comm.context.agreement
        error = read()
        if error == errno.ESRCH or not agreement.is_here(comm.ranks_here[sender]):
            comm.wait(f"{self._name}: wait", lambda: [sender])  # raises, with the reason
        if error:
            text = (
                f"{self._name}: wait failed: cells in a field of rank {sender} cannot be read: "
                f"{os.strerror(error)}. Fields in windows need no permission to be read."
            )
            raise agreement.fail_and_tell(lambda: MpiShareError(text), fatal=False)


def _extent(layout: FieldLayout, box: Box) -> _Extent:
    """Return the bytes of a field from the first cell of a box to the end of the last."""
    steps = layout.strides
    first = sum(at * step for at, step in zip(box.start, steps, strict=True))
    last = sum((end - 1) * step for end, step in zip(box.stop, steps, strict=True))
    return _Extent(first, last - first + layout.dtype.itemsize)


def _is_readable(address: int, nbytes: int) -> bool:
    """Whether another process could read this memory: tries a byte of each page."""
    end = address + nbytes
    pages = np.append(np.arange(address, end, mmap.PAGESIZE, dtype=np.uint64), np.uint64(end - 1))
    found = np.empty(_IOV_MAX, np.uint8)
    for first in range(0, pages.size, _IOV_MAX):
        some = pages[first : first + _IOV_MAX]
        ranges = np.ones((some.size, 2), np.uint64)
        ranges[:, 0] = some
        remote = ctypes.cast(address_of(ranges), ctypes.POINTER(_IoVec))
        local = _IoVec(address_of(found), some.size)
        if _process_vm_readv()(os.getpid(), local, 1, remote, some.size, 0) != some.size:
            return False
    return True


def _blocks(theirs: FieldLayout, mine: FieldLayout, source: Box, target: Box) -> Iterator[_Block]:
    """Yield the reads of a box in the sender's field into one of the same shape in mine."""
    extent, key = _extent(theirs, source), target.slices()
    steps, own = (_steps(target.shape, layout.strides) for layout in (theirs, mine))
    if steps == own and extent.nbytes == target.size * theirs.dtype.itemsize:
        yield _Block(extent, key, None)
    elif extent.nbytes <= _BLOCK_NBYTES or max(steps) == 0:
        yield _Block(extent, key, theirs.strides)
    else:  # cut along the axis that is the slowest in the sender's memory
        axis = steps.index(max(steps))
        count = target.shape[axis]
        planes = min(max(_BLOCK_NBYTES // steps[axis], 1), count - 1)
        for first in range(0, count, planes):
            last = min(first + planes, count)
            cut = (_cut(box, axis, first, last) for box in (source, target))
            yield from _blocks(theirs, mine, *cut)


def _steps(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Return the strides, 0 along axes of one cell, where they mean nothing."""
    return [step if extent > 1 else 0 for extent, step in zip(shape, strides, strict=True)]


def _cut(box: Box, axis: int, first: int, last: int) -> Box:
    """Return the planes of a box from `first` up to before `last` along an axis."""
    start, stop = [*box.start], [*box.stop]
    start[axis], stop[axis] = box.start[axis] + first, box.start[axis] + last
    return Box(tuple(start), tuple(stop))

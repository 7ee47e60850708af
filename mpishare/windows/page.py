"""The page: numbers of the snapshots of one window, in memory that the job and viewers map.

Each rank writes its own slot, viewers only read. A snapshot k goes into buffer k modulo 3 of a
track: k is stored into BEGIN before the copy and into END behind it. A viewer's copy of a buffer is
valid if END and BEGIN were k before, and BEGIN still is k afterwards (a seqlock). There are two
tracks: buffers in host memory, and on CUDA buffers on the rank's GPU.
"""

from __future__ import annotations

import mmap
import platform
import threading
from typing import TYPE_CHECKING

import numpy as np

from mpishare.coordination.control_block import ORDERED_MACHINES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BUFFERS = 3
TOKEN_NBYTES = 64

# Words of 8 bytes in the header, WANTED written by the leader, STRIDE by the first rank with a
# segment. 1 once a viewer without these GPUs asked for snapshots in host memory:
WANTED = 0
# Snapshots whose number is a multiple are copied from GPUs to host memory: 0, or a power of 2, so
# that they use the three buffers in turn.
STRIDE = 1

# Words of a slot. Where the two tracks begin, each with BEGIN of its three buffers, then END:
HOST = 0
DEVICE = 9
BEGIN = 0
END = 3
# Host track on CUDA: the number in the buffer on the GPU when its copy ended.
MARK = 6
TOKEN = 16
TOKEN_READY = 24  # 1 once TOKEN holds the IPC handle of the rank's buffers on its GPU
HOST_FAILED = 25  # 1 if this rank cannot copy to host memory

_SLOT_WORDS = 32
# Buffers of a rank begin at a multiple of this, for huge pages: free in a sparse file.
_BLOCK_NBYTES = 2 << 20


def slot(rank: int) -> int:
    """Return the first word of a rank's slot."""
    return (rank + 1) * _SLOT_WORDS


def page_nbytes(size: int) -> int:
    return 8 * slot(size)


def buffer_nbytes(nbytes: int) -> int:
    """Return the distance between the buffers of a segment: whole pages."""
    return -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE


def block_offsets(segments: Sequence[int | None]) -> tuple[list[int], int]:
    """Return the offsets of the ranks' host buffers in the file of the page, and the file's size.

    A rank without a segment has None in `segments`, the sizes in bytes.
    """
    offsets = []
    end = page_nbytes(len(segments))
    for nbytes in segments:
        end = -(-end // _BLOCK_NBYTES) * _BLOCK_NBYTES
        offsets.append(end)
        end += 0 if nbytes is None else BUFFERS * buffer_nbytes(nbytes)
    return offsets, end


def is_dense(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether an array fills its memory, in whatever order of its axes: C, Fortran, any other."""
    expected = itemsize
    for stride, extent in sorted(zip(strides, shape, strict=True)):
        if extent != 1:
            if stride != expected:
                return 0 in shape
            expected *= extent
    return True


def newest(page: memoryview[int], starts: Sequence[int], checked: Sequence[int]) -> int:
    """Return the newest snapshot that is complete on all ranks; 0 if there is none.

    `starts` are the first words of the tracks, one for each rank with a segment; `checked` the
    words with the number of a complete snapshot: BEGIN, END, MARK.
    """
    first = starts[0] + END
    for number in sorted(page[first : first + BUFFERS], reverse=True):
        place = number % BUFFERS
        if all(page[start + word + place] == number for start in starts for word in checked):
            return number
    return 0


def is_begun_over(page: memoryview[int], starts: Sequence[int], number: int) -> bool:
    """Whether any rank has begun to write another snapshot into the buffer of this one."""
    place = number % BUFFERS
    return any(page[start + place] != number for start in starts)


def _load_barrier() -> Callable[[], None]:
    """Return a function that orders the loads before it and those after it, without MPI."""
    if platform.machine() in ORDERED_MACHINES:
        return lambda: None
    lock = threading.Lock()

    def barrier() -> None:
        # The release of the first lock waits for all loads before it, the second lock is taken
        # after that, and loads after the acquisition of a lock wait for it.
        with lock:
            pass
        with lock:
            pass

    return barrier


load_barrier = _load_barrier()


def token_bytes(page: memoryview[int], rank: int) -> bytes:
    first = slot(rank) + TOKEN
    return np.array(page[first : first + TOKEN_NBYTES // 8], dtype=np.uint64).tobytes()


def write_token(page: memoryview[int], rank: int, token: bytes) -> None:
    """Store the IPC handle of a rank's buffers; the caller sets TOKEN_READY."""
    first = slot(rank) + TOKEN
    for index, word in enumerate(np.frombuffer(token, dtype=np.uint64).tolist()):
        page[first + index] = word

"""The page: numbers of the snapshots of one window, in memory that the job and viewers map.

Each rank writes its own slot, viewers only read. A snapshot k goes into buffer k modulo the number
of buffers: three of a window, so that the newest is whole while the next is taken; more of a
channel, whose viewers read every frame. The slot has a record of each buffer: k is stored into
BEGIN before the copy and into END behind it. A viewer's copy of a buffer is valid if END and BEGIN
were k before, and BEGIN still is k afterwards (a seqlock). A record has two tracks: buffers in host
memory, and on CUDA buffers on the rank's GPU.
"""

from __future__ import annotations

import functools
import json
import platform
import struct
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpishare.coordination.control_block import ORDERED_MACHINES
from mpishare.errors import HandleError
from mpishare.memory.shared import whole_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mpishare.memory.shared import SharedMemory

BUFFERS = 3
MOST_LAG = 1 << 12
TOKEN_NBYTES = 64

# Words of 8 bytes in the header, WANTED written by the leader, STRIDE by the first rank with a
# segment. 1 once a viewer without these GPUs asked for snapshots in host memory:
WANTED = 0
# Snapshots whose number is a multiple are copied from GPUs to host memory: 0, or a power of 2, so
# that they use the three buffers in turn.
STRIDE = 1

# 1 more than the number of the last frame, once a channel was ended.
LAST = 2

# Words of a slot, before the records of its buffers.
TOKEN = 0
TOKEN_READY = 8  # 1 once TOKEN holds the IPC handle of the rank's buffers on its GPU
HOST_FAILED = 9  # 1 if this rank cannot copy to host memory
_HEAD_WORDS = 16
# Words of a track of a record.
BEGIN = 0
END = 1
# Host track on CUDA: the number in the buffer on the GPU when its copy ended.
MARK = 2
NUMBERS = 3  # see `pack_numbers`
NUMBERS_WORDS = 61
_TRACK_WORDS = NUMBERS + NUMBERS_WORDS
# The first words of the tracks in a record.
HOST = 0
DEVICE = _TRACK_WORDS
_RECORD_WORDS = 2 * _TRACK_WORDS

# Buffers of a rank begin at a multiple of this, for huge pages: free in a sparse file.
_BLOCK_NBYTES = 2 << 20


class Places(NamedTuple):
    """Where things lie in the file of a page: `sizes` in bytes by rank, None without a segment."""

    sizes: Sequence[int | None]
    buffers: int = BUFFERS

    def slot(self, rank: int) -> int:
        """Return the first word of a rank's slot."""
        return _HEAD_WORDS + rank * (_HEAD_WORDS + self.buffers * _RECORD_WORDS)

    def track(self, rank: int, track: int, number: int) -> int:
        """Return the first word of a track in the record of a snapshot."""
        record = number % self.buffers * _RECORD_WORDS
        return self.slot(rank) + _HEAD_WORDS + record + track

    def page_nbytes(self) -> int:
        return 8 * self.slot(len(self.sizes))

    def blocks(self) -> tuple[list[int], int]:
        """Return the offsets of the ranks' host buffers in the file, and the file's size."""
        offsets = []
        end = self.page_nbytes()
        for nbytes in self.sizes:
            end = -(-end // _BLOCK_NBYTES) * _BLOCK_NBYTES
            offsets.append(end)
            end += 0 if nbytes is None else self.buffers * whole_pages(nbytes)
        return offsets, end


def pack_numbers(call: str, numbers: Mapping[str, Any]) -> list[int]:
    """Return numbers by name as the words of a record; raise `TypeError` or `ValueError`.

    These are the length of a text, the text with the names and the kinds, and the values.
    """
    if not numbers:
        return [0]
    kinds = [_KINDS.get(type(value)) or _kind(call, name, value) for name, value in numbers.items()]
    text, values = _head(tuple(numbers), "".join(kinds))
    if (nbytes := len(text) * 8 + values.size) > 8 * NUMBERS_WORDS:
        raise ValueError(
            f"{call} failed: the names and numbers take {nbytes} bytes, of {8 * NUMBERS_WORDS}. "
            "Share more than that in a window of its own."
        )
    try:
        return [*text, *memoryview(values.pack(*numbers.values())).cast("Q")]
    except struct.error:
        raise ValueError(
            f"{call} failed: an int of {dict(numbers)} needs more than 64 bits: give a float"
        ) from None


# The kinds of numbers, and how `struct` writes each of them as a word.
_KINDS: dict[type, str] = {int: "q", float: "d", bool: "?"}
_FORMS = {"q": "q", "d": "d", "?": "?7x"}


def _kind(call: str, name: str, value: Any) -> str:
    """Return the kind of a number of NumPy, or of a class of the user's."""
    if isinstance(value, bool | np.bool_):
        return "?"
    if isinstance(value, int | np.integer):
        return "q"
    if isinstance(value, float | np.floating):
        return "d"
    raise TypeError(f"{call} failed: {name}={value!r} is no number: give an int, a float or a bool")


@functools.lru_cache
def _head(names: tuple[str, ...], kinds: str) -> tuple[list[int], struct.Struct]:
    """Return the words before the values, the same at each call of a loop, and the values' form."""
    text = json.dumps(dict(zip(names, kinds, strict=True))).encode()
    padded = text.ljust(-(-len(text) // 8) * 8)
    words = [len(text), *memoryview(padded).cast("Q")]
    return words, struct.Struct("=" + "".join(_FORMS[kind] for kind in kinds))


def unpack_numbers(page: memoryview[int], start: int) -> dict[str, Any]:
    """Return the numbers of the record of a track; `HandleError` if they cannot be such."""
    first = start + NUMBERS
    nbytes = page[first]
    if not nbytes:
        return {}
    record = page[first : first + NUMBERS_WORDS].tobytes()
    try:
        kinds = json.loads(record[8 : 8 + nbytes])
        form = "=" + "".join(_FORMS[kind] for kind in kinds.values())
        values = struct.unpack_from(form, record, 8 * (1 - -nbytes // 8))
    except (ValueError, AttributeError, LookupError, TypeError, struct.error):
        raise HandleError("the job told of numbers beside a frame that are none") from None
    return dict(zip(kinds, values, strict=True))


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


def store(memory: SharedMemory, word: int, value: int) -> None:
    """Store a word of the header by a view of its own, which does not outlive the call."""
    with memoryview(memory.buffer).cast("Q") as words:
        words[word] = value


def token_bytes(page: memoryview[int], slot: int) -> bytes:
    first = slot + TOKEN
    return page[first : first + TOKEN_NBYTES // 8].tobytes()


def write_token(page: memoryview[int], slot: int, token: bytes) -> None:
    """Store the IPC handle of a rank's buffers; the caller sets TOKEN_READY."""
    first = slot + TOKEN
    page[first : first + TOKEN_NBYTES // 8] = memoryview(token).cast("Q")

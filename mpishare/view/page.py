"""The page: numbers of the snapshots of one window, in memory that the job and viewers map.

Each rank with a segment writes its own slot, viewers only read. A snapshot k goes into buffer k
modulo the number of buffers: three of a window, so that the newest is whole while the next is
taken; more of a channel, whose viewers read every frame. The slot has a record of each buffer: k is
stored into `begin` before the copy and into `end` behind it. A viewer's copy of a buffer is valid
if both were k before, and `begin` still is k afterwards (a seqlock). A record has two tracks:
buffers in host memory, and on CUDA buffers on the rank's GPU.
"""

from __future__ import annotations

import functools
import json
import platform
import struct
import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpishare.coordination.control_block import ORDERED_MACHINES
from mpishare.errors import HandleError
from mpishare.memory.memory import host_anchor
from mpishare.memory.shared import whole_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

BUFFERS = 3

# Buffers of a rank begin at a multiple of this, for huge pages: free in a sparse file.
_BLOCK_NBYTES = 2 << 20
_NUMBERS_WORDS = 61

_HEADER = np.dtype(
    [
        # By the leader: 1 once a viewer without these GPUs asked for snapshots in host memory.
        ("wanted", "u8"),
        # By the first slot's rank: snapshots whose number is a multiple are copied from GPUs to
        # host memory. 0, or a power of 2, so that they use the three buffers in turn.
        ("stride", "u8"),
        ("last", "u8"),  # 1 more than the number of the last frame, once a channel was ended
        ("_", "u8", 13),
    ]
)
_TRACK = np.dtype(
    [
        ("begin", "u8"),
        ("end", "u8"),
        ("mark", "u8"),  # host track on CUDA: the number in the GPU's buffer when its copy ended
        ("numbers", "u8", _NUMBERS_WORDS),  # see `pack_numbers`
    ]
)


class Places(NamedTuple):
    """Where things lie in the file of a page: `sizes` in bytes of the segments, by slot."""

    sizes: Sequence[int]
    buffers: int = BUFFERS

    @property
    def slot(self) -> np.dtype[Any]:
        record = [("host", _TRACK), ("device", _TRACK)]
        return np.dtype(
            [
                ("token", "u1", 64),  # the IPC handle of the rank's buffers on its GPU
                ("has_token", "u8"),
                ("host_failed", "u8"),  # 1 if this rank cannot copy to host memory
                ("_", "u8", 6),
                ("records", record, self.buffers),
            ]
        )

    def page_nbytes(self) -> int:
        return _HEADER.itemsize + len(self.sizes) * self.slot.itemsize

    def blocks(self) -> tuple[list[int], int]:
        """Return the offsets of the segments' host buffers in the file, and the file's size."""
        offsets = []
        end = self.page_nbytes()
        for nbytes in self.sizes:
            offsets.append(-(-end // _BLOCK_NBYTES) * _BLOCK_NBYTES)
            end = offsets[-1] + self.buffers * whole_pages(nbytes)
        return offsets, end


class Page:
    """A page in memory, which it keeps mapped: its header, and a slot for each segment."""

    def __init__(self, memory: Any, places: Places) -> None:
        self._bytes = host_anchor(memory, places.page_nbytes())
        self.places = places
        self.header = np.ndarray((), _HEADER, self._bytes)
        n_slots, after = len(places.sizes), _HEADER.itemsize
        self.slots = np.ndarray((n_slots,), places.slot, self._bytes, after)

    def copy(self) -> Page:
        return Page(self._bytes.copy(), self.places)


def pack_numbers(call: str, numbers: Mapping[str, Any]) -> list[int]:
    """Return numbers by name as the words of a record; raise `TypeError` or `ValueError`.

    These are the length of a text, the text with the names and the kinds, and the values.
    """
    if not numbers:
        return [0]
    kinds = [_KINDS.get(type(value)) or _kind(call, name, value) for name, value in numbers.items()]
    text, values = _head(tuple(numbers), "".join(kinds))
    if (nbytes := len(text) * 8 + values.size) > 8 * _NUMBERS_WORDS:
        raise ValueError(
            f"{call} failed: the names and numbers take {nbytes} bytes, of {8 * _NUMBERS_WORDS}. "
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


def unpack_numbers(record: bytes) -> dict[str, Any]:
    """Return the numbers of the words of a record; `HandleError` if they cannot be such."""
    nbytes = int.from_bytes(record[:8], sys.byteorder)
    if not nbytes:
        return {}
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

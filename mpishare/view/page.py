"""What a job and its viewers share of a named window: its description, and the page.

The leader's door sends the description, as JSON. The page has the numbers of the snapshots, in
memory that the job and viewers map. Each rank with a segment writes its own slot, viewers only
read. A snapshot k goes into buffer k modulo the number of buffers: three of a window, so that the
newest is whole while the next is taken; more of a channel, whose viewers read every frame. The slot
has a record of each buffer: k is stored into `begin` before the copy and into `end` behind it. A
viewer's copy of a buffer is valid if both were k before, and `begin` still is k afterwards (a
seqlock). A record has two tracks: buffers in host memory, and on CUDA buffers on the rank's GPU.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpishare.errors import HandleError
from mpishare.memory.fd_client import printable
from mpishare.memory.memory import ArrayLayout, host_anchor
from mpishare.memory.shared import whole_pages

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mpishare.memory.fd_client import FdClient

# Version of the messages of doors, of descriptions and of pages.
VERSION = 5

# Descriptors in one reply: the kernel takes 253.
MAX_FDS = 200

BUFFERS = 3

# Buffers of a rank begin at a multiple of this, for huge pages: free in a sparse file.
_BLOCK_NBYTES = 2 << 20
# The numbers beside a snapshot are JSON, behind its length; a record is of whole cache lines.
_NUMBERS_WORDS = 125
_MOST_NUMBERS_NBYTES = 8 * (_NUMBERS_WORDS - 1)

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


class Segment(NamedTuple):
    """One rank's part: its layout in memory, its GPU, and the driver's handle of it."""

    rank: int
    layout: ArrayLayout
    uuid: str = ""
    token: str = ""


@dataclass(frozen=True)
class Description:
    """A named window as its job describes it; `segments` in the order of their ranks."""

    backend: str
    segments: tuple[Segment, ...]
    why_not_live: str  # empty if other processes can map its memory
    pid: int  # of the leader of the node
    viewers: tuple[int, ...] = ()  # processes that have attached
    lag: int = 0  # of a channel: frames that a viewer may be behind

    def places(self) -> Places:
        sizes = [segment.layout.nbytes for segment in self.segments]
        return Places(sizes, self.lag + 1 if self.lag else BUFFERS)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.segments[0].layout.dtype

    @property
    def n_files(self) -> int:
        """Descriptors that come with it: of the page, and on the host of the segments."""
        return 1 if self.why_not_live or self.backend == "cuda" else 1 + len(self.segments)

    def pack(self) -> dict[str, Any]:
        segments = [(s.rank, s.layout.pack(), s.uuid, s.token) for s in self.segments]
        return {"version": VERSION, "window": {**vars(self), "segments": segments}}

    @classmethod
    def ask(cls, visit: FdClient, **request: Any) -> Description:
        """Return what a window's door answers; raises as `FdClient.ask`.

        Also `HandleError` if it is of another version, or of another program: the kernel says that
        it is this user's.
        """
        received, _ = visit.ask({"version": VERSION, **request})
        if (version := received.get("version")) != VERSION:
            raise HandleError(
                f"the job's mpishare speaks version {printable(version)} of the protocol, this one "
                f"{VERSION}. Use the same mpishare."
            )
        try:
            facts = received["window"]
            segments = tuple(
                Segment(rank, ArrayLayout.unpack(layout), uuid, token)
                for rank, layout, uuid, token in facts["segments"]
            )
            return cls(**facts | {"segments": segments, "viewers": tuple(facts["viewers"])})
        except (KeyError, TypeError, ValueError) as error:
            raise HandleError(f"the job told of no window: {printable(error)}") from None


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
    """Return numbers by name as the words of a record; raise `TypeError` or `ValueError`."""
    if not numbers:
        return [0]
    plain = {name: _number(call, name, value) for name, value in numbers.items()}
    text = json.dumps(plain).encode()
    if len(text) > _MOST_NUMBERS_NBYTES:
        raise ValueError(
            f"{call} failed: the names and numbers take {len(text)} bytes as text, of "
            f"{_MOST_NUMBERS_NBYTES}. Share more than that in a window of its own."
        )
    return [len(text), *memoryview(text.ljust(-(-len(text) // 8) * 8)).cast("Q")]


def _number(call: str, name: str, value: Any) -> bool | int | float:
    """Return a number, also one of NumPy or of a class of the user's, as JSON has it."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return float(value)
    raise TypeError(f"{call} failed: {name}={value!r} is no number: give an int, a float or a bool")


def unpack_numbers(record: bytes) -> dict[str, Any]:
    """Return the numbers of the words of a record."""
    nbytes = int.from_bytes(record[:8], sys.byteorder)
    found: dict[str, Any] = json.loads(record[8 : 8 + nbytes] or "{}")
    return found

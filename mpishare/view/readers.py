"""What a viewer maps and reads: live memory, and frames, which are whole copies of snapshots."""

from __future__ import annotations

import math
import mmap
import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.errors import CudaError, HandleError, UnsupportedError, format_nbytes
from mpishare.memory.arguments import ghosts_of
from mpishare.memory.memory import host_anchor, host_array
from mpishare.memory.shared import whole_pages
from mpishare.native import memory_barrier
from mpishare.runtime.preflight import missing
from mpishare.view.page import Page, unpack_numbers

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from mpishare.backends.cuda import CudaBackend
    from mpishare.memory.memory import Memory
    from mpishare.view.page import Description, Segment


def open_gpu(uuids: Sequence[str]) -> tuple[CudaBackend, set[str]]:
    """Return this process's backend on the first of these GPUs that it sees, else on any.

    Its GPU becomes the current one. Also returns the GPUs that this process does not see. Raises
    `UnsupportedError` if it sees none, or lacks the packages to use one.
    """
    if why := missing():
        raise UnsupportedError(why)
    try:
        from mpishare.backends.cuda import CudaBackend
        from mpishare.backends.driver import visible_uuids
    except ImportError as error:
        raise UnsupportedError(f"CuPy or cuda-bindings cannot be loaded: {error}") from None
    visible = visible_uuids()
    ordinal = next((visible.index(uuid) for uuid in uuids if uuid in visible), 0)
    return CudaBackend(ordinal, f"process {os.getpid()}"), {*uuids} - {*visible}


def map_part(fd: int, nbytes: int, offset: int = 0, *, is_writable: bool = False) -> mmap.mmap:
    """Map bytes within the size of a file. Arrays on them keep them mapped."""
    size = os.fstat(fd).st_size
    if size < offset + max(nbytes, 1):
        needed = format_nbytes(offset + nbytes)
        raise HandleError(
            f"the job gave a file of {format_nbytes(size)}, which is too small: {needed} are needed"
        )
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
    return mmap.mmap(fd, max(nbytes, 1), prot=protection, offset=offset)


def map_file(segment: Segment, fd: int, *, is_writable: bool) -> Any:
    """Return a rank's segment on the host as an array on its file."""
    if not is_writable:
        return host_array(host_anchor(map_part(fd, segment.layout.nbytes)), segment.layout)
    # The descriptor may be read-only; a process of the same user may open the file once more.
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        mapping = map_part(again, segment.layout.nbytes, is_writable=True)
    finally:
        os.close(again)
    return host_array(host_anchor(mapping), segment.layout)


class Frame:
    """A snapshot: copies that belong to this process.

    Attributes
    ----------
    number : int
        From 1: the number of calls of each rank to `Window.snapshot`; of frames of the channel.
    numbers : dict
        What the ranks gave `Window.snapshot` by name; of the lowest rank that gave the name.
    """

    def __init__(self, number: int, arrays: dict[int, Any], numbers: dict[str, Any]) -> None:
        self.number = number
        self.numbers = numbers
        self._arrays = arrays

    @property
    def array(self) -> Any:
        """The whole window, or the first rank's segment where each rank has one."""
        return next(iter(self._arrays.values()))

    def segment(self, rank: int) -> Any:
        """Return that rank's segment; ValueError if it has none."""
        if rank not in self._arrays:
            raise ValueError(f"rank {rank!r} has no segment; ranks {list(self._arrays)} do")
        return self._arrays[rank]

    def whole(self, dims: Sequence[int], width: Any = 0) -> Any:
        """Return a new array of the whole of a Cartesian grid, joined from all segments.

        Parameters
        ----------
        dims : sequence of int
            The number of ranks along each axis of the segments, as of ``Create_cart`` of MPI; 1
            along an axis that is not cut. The ranks lie row by row, as MPI numbers them. Blocks may
            be of uneven size.
        width : int, or sequence of int or (low, high)
            The ghosts of each segment, which are left out: as of `HaloExchange`, but the same on
            all ranks.

        Raises
        ------
        ValueError
            If the segments do not fit together so.
        """
        return _join(self._arrays, dims, width)

    def __repr__(self) -> str:
        return f"<mpishare frame {self.number} of ranks {list(self._arrays)}>"


# A snapshot that was overwritten before its copy was over.
OVERWRITTEN = Frame(0, {}, {})


class Reader(ABC):
    """Reads snapshots that are complete on all ranks: the newest, or of a channel the next.

    `fd` is the file of the page and of the buffers in host memory, `track` that of the buffers to
    read, `checked` the words with the number of a complete snapshot.
    """

    _kept: dict[int, Frame] | None = None  # once it is closed: frames that were copied before

    def __init__(self, fd: int, window: Description, track: str, checked: Sequence[str]) -> None:
        places = window.places()
        self._page = Page(map_part(fd, places.page_nbytes()), places)
        self._segments = window.segments
        self._checked = checked
        self._track = track
        self._reads_all = window.lag > 0
        self._memory_barrier = memory_barrier()

    def read(self, than: int) -> Frame | None:
        """Return a complete snapshot, or that it was `OVERWRITTEN`.

        It is the newest, or of a channel the one behind the number `than`; None if there is none
        above `than`.
        """
        found = sorted(self._tracks["end"][0].tolist(), reverse=True)
        newest = next((n for n in found if n and self._is_complete(n)), 0)
        number = than + 1 if self._reads_all else newest
        if self._kept is not None:
            return self._kept.pop(number, self._missing(number))
        if number <= than or not self._is_complete(number):
            return self._missing(number)
        self._memory_barrier()
        arrays = self._copy(number % self._page.places.buffers)
        records = [words.tobytes() for words in self._records(number)["numbers"]]
        self._memory_barrier()
        if self._is_overwritten(number):
            return OVERWRITTEN
        numbers: dict[str, Any] = {}
        for record in reversed(records):
            numbers |= unpack_numbers(record)
        return Frame(number, arrays, numbers)

    def _missing(self, number: int) -> Frame | None:
        """Return what is read in place of a snapshot that is not, or no more, complete."""
        return OVERWRITTEN if self._reads_all and self._is_overwritten(number) else None

    def numbers(self) -> dict[int, int]:
        """Return for each rank the number of its newest snapshot."""
        newest = self._tracks["end"].max(axis=1).tolist()
        return dict(zip(self._ranks, newest, strict=True))

    def last(self) -> int | None:
        """Return the number of the last frame of a channel that was ended."""
        behind = int(self._page.header["last"])
        return behind - 1 if behind else None

    def failed(self) -> list[int]:
        """Return the ranks that have no room for snapshots in host memory."""
        failed = self._page.slots["host_failed"].tolist()
        return [rank for rank, is_so in zip(self._ranks, failed, strict=True) if is_so]

    @property
    def _ranks(self) -> list[int]:
        return [segment.rank for segment in self._segments]

    @property
    def _tracks(self) -> np.ndarray[Any, Any]:
        return self._page.slots["records"][self._track]  # by segment, then by buffer

    def _records(self, number: int) -> np.ndarray[Any, Any]:
        return self._tracks[:, number % self._page.places.buffers]

    def _is_complete(self, number: int) -> bool:
        records = self._records(number)
        return all((records[word] == number).all() for word in self._checked)

    def _is_overwritten(self, number: int) -> bool:
        """Whether any rank has begun to write a later snapshot into the buffer of this one."""
        return bool((self._records(number)["begin"] > number).any())

    def close(self, than: int | None) -> None:
        """Unmap, but keep the page as it is, and the frames behind the number `than`."""
        if self._kept is not None:
            return
        kept: dict[int, Frame] = {}
        while than is not None and (frame := self.read(than)) not in (None, OVERWRITTEN):
            than += 1
            kept[than] = frame
        self._kept = kept
        # Not released: another thread may be reading it, and the mapping goes with the last one.
        self._page = self._page.copy()

    @abstractmethod
    def _copy(self, place: int) -> dict[int, Any]:
        """Copy one of the buffers of each rank."""


class HostReader(Reader):
    """Reads the buffers in host memory; of a window on GPUs, copies of the buffers there."""

    def __init__(self, fd: int, window: Description) -> None:
        marks = ("mark",) if window.backend == "cuda" else ()
        super().__init__(fd, window, "host", ("begin", "end", *marks))
        offsets, _ = self._page.places.blocks()
        buffers = self._page.places.buffers
        self._buffers: dict[int, list[Any]] = {}  # by rank
        for segment, offset in zip(window.segments, offsets, strict=True):
            step = whole_pages(segment.layout.nbytes)
            mapping = map_part(fd, buffers * step, offset)
            whole = host_anchor(mapping)
            places = [segment.layout._replace(offset=n * step) for n in range(buffers)]
            self._buffers[segment.rank] = [host_array(whole, place) for place in places]

    def _copy(self, place: int) -> dict[int, Any]:
        return {rank: parts[place].copy(order="K") for rank, parts in self._buffers.items()}


class CudaReader(Reader):
    """Reads the buffers on the GPUs of the ranks."""

    def __init__(self, fd: int, window: Description, backend: CudaBackend) -> None:
        super().__init__(fd, window, "device", ("begin", "end"))
        self.backend = backend
        self._memories: dict[int, Memory] = {}
        self._stream = backend.xp.cuda.Stream(non_blocking=True)

    def why_not_mapped(self, hidden: Collection[str]) -> str:
        """Map the buffers on the GPUs, some of them hidden; return why that fails, else nothing.

        They may not exist before the first snapshot: those of visible GPUs can be mapped then.
        """
        try:
            for segment, slot in zip(self._segments, self._page.slots, strict=True):
                if slot["has_token"]:
                    self._buffers_of(segment, slot)
                elif segment.uuid in hidden:
                    return f"{segment.uuid[:12]} is not visible"
        except CudaError as error:
            return str(error).rstrip(".")
        return ""

    def _copy(self, place: int) -> dict[int, Any]:
        from mpishare.backends.cuda_streams import on_stream  # imports CuPy

        backend, copies = self.backend, {}
        backend.make_current()
        with on_stream(self._stream):
            for segment, slot in zip(self._segments, self._page.slots, strict=True):
                shape, dtype, strides, _ = segment.layout
                nbytes = segment.layout.nbytes
                source = self._buffers_of(segment, slot).address + place * whole_pages(nbytes)
                target = backend.xp.empty(nbytes, "u1").data
                if nbytes:
                    backend.copy(target.ptr, source, nbytes, self._stream.ptr)
                copies[segment.rank] = backend.xp.ndarray(
                    shape, dtype, memptr=target, strides=strides
                )
        self._stream.synchronize()
        return copies

    def _buffers_of(self, segment: Segment, slot: np.void) -> Memory:
        rank = segment.rank
        if rank not in self._memories:
            token = slot["token"].tobytes().hex()
            nbytes = self._page.places.buffers * (whole_pages(segment.layout.nbytes) + 8)
            self._memories[rank] = self.backend.open(token, nbytes, segment.uuid)
        return self._memories[rank]

    def close(self, than: int | None) -> None:
        super().close(than)
        for memory in self._memories.values():
            memory.close()
        self._memories = {}


# --- the whole of a grid


def _join(segments: Mapping[int, Any], dims: Sequence[int], width: Any) -> Any:
    axes = {array.ndim for array in segments.values()}
    if math.prod(dims) != len(segments) or axes != {len(dims)}:
        raise ValueError(
            f"whole failed: dims {tuple(dims)} do not fit {len(segments)} segments of "
            f"{sorted(axes)} axes: give the number of ranks along each axis, 1 for one that is not "
            "cut"
        )
    ghosts = ghosts_of(width, len(dims))
    if ghosts is None:
        raise ValueError(
            f"whole failed: width={width!r} must be an int, or for each of {len(dims)} axes an int "
            "or a pair (low, high), none of them negative"
        )
    blocks = [_owned(rank, segment, ghosts) for rank, segment in segments.items()]
    try:
        for axis in reversed(range(len(dims))):  # the last axis of the grid first: row by row
            count = dims[axis]
            rows = [blocks[i : i + count] for i in range(0, len(blocks), count)]
            blocks = [np.concatenate(row, axis) for row in rows]  # CuPy's where the blocks are
    except ValueError as error:
        raise ValueError(
            f"whole failed: the segments do not fit together as {tuple(dims)}: {error}"
        ) from None
    return blocks[0]


def _owned(rank: int, segment: Any, ghosts: Sequence[tuple[int, int]]) -> Any:
    axes = list(zip(ghosts, segment.shape, strict=True))
    if any(low + high > extent for (low, high), extent in axes):
        raise ValueError(
            f"whole failed: the segment of rank {rank}, {segment.shape}, is all ghosts"
        )
    return segment[tuple(slice(low, extent - high) for (low, high), extent in axes)]

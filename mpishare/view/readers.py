"""Readers of snapshots outside the job: copies of buffers that were not written meanwhile."""

from __future__ import annotations

import mmap
import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from mpishare.errors import CudaError, HandleError, format_nbytes
from mpishare.memory.memory import host_anchor, host_array
from mpishare.memory.shared import whole_pages
from mpishare.view.frames import Frame
from mpishare.view.page import Page, load_barrier, unpack_numbers

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import numpy as np

    from mpishare.backends.cuda import CudaBackend
    from mpishare.memory.memory import Memory
    from mpishare.view.description import Description, Segment

# A snapshot that was overwritten before its copy was over.
OVERWRITTEN = Frame(0, {}, {})


def map_part(fd: int, nbytes: int, offset: int, *, is_writable: bool) -> mmap.mmap:
    """Map bytes within the size of a file. Arrays on them keep them mapped."""
    size = os.fstat(fd).st_size
    if size < offset + max(nbytes, 1):
        needed = format_nbytes(offset + nbytes)
        raise HandleError(
            f"the job gave a file of {format_nbytes(size)}, which is too small: {needed} are needed"
        )
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
    return mmap.mmap(fd, max(nbytes, 1), prot=protection, offset=offset)


class Reader(ABC):
    """Reads snapshots that are complete on all ranks: the newest, or of a channel the next.

    `fd` is the file of the page and of the buffers in host memory, `track` that of the buffers to
    read, `checked` the words with the number of a complete snapshot.
    """

    _kept: dict[int, Frame] | None = None  # once it is closed: frames that were copied before

    def __init__(self, fd: int, window: Description, track: str, checked: Sequence[str]) -> None:
        places = window.places()
        self._page = Page(map_part(fd, places.page_nbytes(), 0, is_writable=False), places)
        self._segments = window.segments
        self._checked = checked
        self._track = track
        self._reads_all = window.lag > 0

    def read(self, than: int) -> Frame | None:
        """Return a complete snapshot, or that it was `OVERWRITTEN`.

        It is the newest, or of a channel the one behind the number `than`; None if there is none
        above `than`.
        """
        number = than + 1 if self._reads_all else self._newest()
        if self._kept is not None:
            return self._kept.pop(number, self._missing(number))
        if number <= than or not self._is_complete(number):
            return self._missing(number)
        load_barrier()
        arrays = self._copy(number % self._page.places.buffers)
        records = [words.tobytes() for words in self._records(number)["numbers"]]
        load_barrier()
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

    def _newest(self) -> int:
        """Return the newest snapshot that is complete on all ranks; 0 if there is none."""
        found = sorted(self._tracks["end"][0].tolist(), reverse=True)
        return next((n for n in found if n and self._is_complete(n)), 0)

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
            mapping = map_part(fd, buffers * step, offset, is_writable=False)
            whole = host_anchor(mapping)
            places = [segment.layout._replace(offset=n * step) for n in range(buffers)]
            self._buffers[segment.rank] = [host_array(whole, place) for place in places]

    def _copy(self, place: int) -> dict[int, Any]:
        return {rank: parts[place].copy(order="K") for rank, parts in self._buffers.items()}


class CudaReader(Reader):
    """Reads the buffers on the GPUs of the ranks."""

    def __init__(self, fd: int, window: Description, backend: CudaBackend) -> None:
        super().__init__(fd, window, "device", ("begin", "end"))
        self._backend = backend
        self._memories: dict[int, Memory] = {}
        self._stream = backend.xp.cuda.Stream(non_blocking=True)

    def map_hidden(self, hidden: Collection[str]) -> str:
        """Map the buffers on GPUs that this process does not see; return why that is impossible.

        Without a reason where they do not exist yet, before the first snapshot.
        """
        for segment, slot in zip(self._segments, self._page.slots, strict=True):
            if segment.uuid not in hidden:
                continue
            if not slot["has_token"]:
                return f"{segment.uuid[:12]} is not visible"
            try:
                self._buffers_of(segment, slot)
            except CudaError as error:
                return str(error).rstrip(".")
        return ""

    def _copy(self, place: int) -> dict[int, Any]:
        from mpishare.backends.cuda_streams import on_stream  # imports CuPy

        backend, copies = self._backend, {}
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
            self._memories[rank] = self._backend.open(token, nbytes, segment.uuid)
        return self._memories[rank]

    def close(self, than: int | None) -> None:
        super().close(than)
        for memory in self._memories.values():
            memory.close()
        self._memories = {}

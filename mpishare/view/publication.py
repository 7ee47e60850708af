"""A named window for processes outside the job: its page, its door, its viewers.

It implements the `Publication` of `windows/publisher.py`.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mpishare.errors import UnsupportedError
from mpishare.memory import dtypes
from mpishare.memory.handle import Handle
from mpishare.memory.kinds import Kind
from mpishare.memory.shared import map_on_all_ranks, path_of
from mpishare.view.attached import attach
from mpishare.view.names import door_name, job_id, listed, visit_mine
from mpishare.view.page import MAX_FDS, VERSION, Description, Page, Segment, pack_numbers
from mpishare.view.snapshots import CudaSnapshots, HostSnapshots, Slot
from mpishare.windows.publisher import DETACH_S, NO_NUMBERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mpishare.memory.fd_server import Client, Endpoint
    from mpishare.memory.memory import ArrayLayout
    from mpishare.memory.shared import SharedMemory
    from mpishare.runtime.context import NodeContext
    from mpishare.runtime.stream_chain import StreamChain

MOST_VIEWERS = 256
_ANSWER_S = 2.0


class Publication:
    """The page, door and buffers of a named window. Made collectively, host-blocking.

    `handles` has those of the ranks with a segment, packed. Memory that was shared in place cannot
    be mapped by its handle outside the job: then there are snapshots alone. So it is for a channel,
    which has no handles, and whose viewers may be `lag` frames behind. Raises `ValueError` on all
    ranks if another window of this job has the name; `UnsupportedError` if there is no room, if an
    array leaves gaps in its memory, or if its dtype has no text.
    """

    def __init__(
        self,
        context: NodeContext,
        call: str,
        name: str,
        segments: Mapping[int, ArrayLayout],
        handles: Mapping[int, str],
        lag: int = 0,
    ) -> None:
        self.name = name
        self._context = context
        opened = {r: Handle.unpack(packed) for r, packed in handles.items()}
        self._tokens = {r: h.token for r, h in opened.items() if h.kind == Kind.ALLOCATION}
        self._window = self._describe(
            segments, is_in_place=opened.keys() != self._tokens.keys(), lag=lag
        )
        self._places = self._window.places()
        self._check(call)
        self._number = 0  # of snapshots
        self._fds: list[int] = []
        self._page: Page | None = None
        self._held = ExitStack()  # its memory, and what is made on that
        self._snapshots: HostSnapshots | CudaSnapshots | None = None
        self._opening: Endpoint | None = None
        self._is_ended = False
        memory = map_on_all_ranks(
            partial(context.agreement.step_keeping, call),
            self._places.page_nbytes(),
            is_maker=self._is_leader,
        )
        self._held.callback(memory.close)
        with ExitStack() as undo:
            undo.callback(self.discard)
            mine = segments.get(context.rank)
            replies = context.agreement.step(call, lambda: self._open(memory, mine))
            self.job, is_taken = replies[0][:2]
            self.paths = [path for _, _, path in replies]  # to the segments' files, or empty
            if is_taken:
                raise ValueError(
                    f"{call} failed: the name {name!r} is taken by another window of job "
                    f"{self.job}. Choose another one, or close that window first."
                )
            if lag:  # each put copies: the memory is taken now, not at the first
                context.agreement.step(call, self._reserve)
            undo.pop_all()

    @property
    def _is_leader(self) -> bool:
        return self._context.rank == 0

    def reduce(self, *, writable: bool) -> Any:
        """Return what `__reduce__` does, for another process of this machine."""
        if why := self._window.why_not_live:
            raise TypeError(
                f"{self.name!r} cannot be pickled: {why}, and a process outside the job cannot map "
                "such memory. Share a copy (copy=True), or read snapshots there: "
                f"mpishare.attach({self.name!r}).latest()"
            )
        return partial(attach, self.name, job=self.job, writable=writable), ()

    def end(self) -> None:
        """Tell the viewers of a channel that there are no more frames."""
        if self._page is not None:
            self._page.header["last"] = self._number + 1

    def take(
        self, array: Any, chain: StreamChain, stream: Any, numbers: Mapping[str, Any] = NO_NUMBERS
    ) -> None:
        """Take a snapshot of this rank's segment; see `Window.snapshot`."""
        # Counts all calls, even those that raise: else the numbers of the ranks would drift apart
        # after an error on one of them, and frames would be of different steps.
        self._number += 1
        words = pack_numbers(f"{self.name}: snapshot", numbers)
        handle = chain.enter("snapshot", stream)
        if self._snapshots is not None:
            self._snapshots.take(self._number, array, words, handle)
        chain.leave()

    def detach_viewers(self, call: str) -> list[int]:
        """End the publication and wait some seconds for viewers that map memory on a GPU.

        Collective, host-blocking; once all streams are done. May be repeated, for the viewers that
        are left. Returns the viewers that still map memory of the window: it must not be freed.
        Mappings on the host are no hazard to viewers, nor to the job, and stay.
        """
        step = self._context.agreement.step
        viewers = list(step(call, self._end)[0])
        step(call, lambda: self._free(is_viewed=bool(viewers)))
        return viewers

    def abandon(self) -> None:
        """Stop answering, and end all leases."""
        if self._opening is not None:
            self._opening.shut()
            self._opening = None

    def discard(self) -> None:
        """Undo the creation, before any viewer knows of it."""
        self.abandon()
        self._free(is_viewed=False)

    # --- making

    def _describe(
        self, segments: Mapping[int, ArrayLayout], *, is_in_place: bool, lag: int
    ) -> Description:
        """Return the window as viewers read it.

        Memory of GPUs is mapped by its token, that of the host by its file.
        """
        context = self._context
        why = "it was shared in place" if is_in_place else "it is a channel" if lag else ""
        tokens = self._tokens if context.backend.has_streams and not why else {}
        parts = [
            Segment(rank, each, context.uuids[rank], tokens.get(rank, ""))
            for rank, each in segments.items()
        ]
        name = context.backend.name
        return Description(name, tuple(parts), why, os.getpid(), lag=lag)

    def _check(self, call: str) -> None:
        """Raise where the window cannot be described to viewers, or no snapshot be taken."""
        try:
            dtypes.dump(self._window.dtype)
        except UnsupportedError as error:
            raise UnsupportedError(f"{call} failed: name={self.name!r}: {error}") from None
        for rank, array, *_ in self._window.segments:
            if not array.is_dense:
                raise UnsupportedError(
                    f"{call} failed: name={self.name!r}: the array of rank {rank} leaves gaps "
                    f"(shape {array.shape}, strides {array.strides}), of which no snapshot can be "
                    "taken. Give the window no name, or share a contiguous array."
                )

    def _open(self, memory: SharedMemory, mine: ArrayLayout | None) -> list[Any]:
        """Open the files and the door; return the job, whether the name is taken, and a path."""
        context = self._context
        if self._is_leader:
            os.ftruncate(memory.fd, self._places.blocks()[1])
        self._page = Page(memory.buffer, self._places)
        shift = context.backend.register(memory) - memory.address
        self._held.callback(context.backend.unregister, memory)
        if mine is not None:
            index = [segment.rank for segment in self._window.segments].index(context.rank)
            slot = Slot(self._page, memory.fd, shift, index, mine)
            self._snapshots = (
                CudaSnapshots(slot, context.backend)
                if context.backend.has_streams
                else HostSnapshots(slot, context.memory_barrier)
            )
        job = self._open_door(memory.fd) if self._is_leader else ["", False]
        fds = self._files([context.rank])
        return [*job, path_of(*fds) if fds else ""]

    def _reserve(self) -> None:
        if self._snapshots is not None:
            self._snapshots.make_buffers()

    def _files(self, ranks: Iterable[int]) -> list[int]:
        """Open the files of segments, as far as there are any, until the end."""
        fds = []
        for token in (self._tokens[rank] for rank in ranks if rank in self._tokens):
            fd = self._context.backend.descriptor(token)
            if fd is not None:
                self._held.callback(os.close, fd)
                fds.append(fd)
        return fds

    def _open_door(self, page: int) -> list[Any]:
        """Open the door, behind which viewers get the files, that of the page first."""
        context, job = self._context, job_id(os.getpid())
        self._fds = [os.open(f"/proc/self/fd/{page}", os.O_RDONLY | os.O_CLOEXEC)]
        self._held.callback(os.close, self._fds[0])
        self._fds += [] if self._window.why_not_live else self._files(self._tokens)
        self._opening = context.fd_server.open(
            door_name(job, self.name), self._answer, self._viewer_left, most=MOST_VIEWERS
        )
        # Of two that open the same name at once, each finds the other now, and both are refused.
        return [job, self._is_taken(job, self._opening.address)]

    def _is_taken(self, job: str, mine: str) -> bool:
        """Whether another window of this job has the name, in whatever process."""
        others = [each for each in listed(self.name, job) if each.address != mine]
        visits = visit_mine(others, _ANSWER_S)
        for visit in visits.values():
            visit.close()
        return bool(visits)

    # --- in the door's thread

    def _answer(self, request: dict[str, Any], _: Client) -> tuple[dict[str, Any], Sequence[int]]:
        if request.get("version", VERSION) != VERSION:
            return {"version": VERSION}, []
        if "fds" in request:
            first = int(request["fds"])
            return {}, self._fds[first : first + MAX_FDS]
        if request.get("wants_host_copies"):
            self._want_host_copies(1)
            return {}, []
        viewers = self._leases("attaches")
        return replace(self._window, viewers=tuple(viewers)).pack(), []

    def _viewer_left(self, _: Client) -> None:
        if not self._leases("wants_host_copies"):
            self._want_host_copies(0)

    def _leases(self, asked: str) -> list[int]:
        return [] if self._opening is None else self._opening.leases(asked)

    def _want_host_copies(self, value: int) -> None:
        if self._page is not None:
            self._page.header["wanted"] = value

    # --- closing

    def _end(self) -> list[int]:
        """On the leader: stop answering, notify the viewers, wait while any maps GPU memory."""
        opening = self._opening
        if opening is None:  # on another rank, or all have gone
            return []
        if not self._context.backend.has_streams:
            viewers = []
        elif self._is_ended:
            viewers = opening.leases("maps")
        else:
            viewers = opening.end_leases(DETACH_S, "maps")
            self._is_ended = True
        if not viewers:
            self.abandon()
        return viewers

    def _free(self, *, is_viewed: bool) -> None:
        """Free the buffers, the page and the files, after the last write there."""
        if self._snapshots is not None and self._snapshots.close(is_viewed=is_viewed):
            self._snapshots = None
        self._page = None
        self._held.close()

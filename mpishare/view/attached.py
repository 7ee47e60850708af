"""A named window in a process outside the job: no MPI is needed, and none is started."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from mpishare.coordination.poll import poll
from mpishare.errors import ClosedError, CudaError, HandleError, PeerTimeout, UnsupportedError, late
from mpishare.memory.arguments import require_duration, require_wait
from mpishare.view.names import find, job_text, listed
from mpishare.view.page import MAX_FDS, Description
from mpishare.view.readers import OVERWRITTEN, CudaReader, HostReader, map_file, open_gpu
from mpishare.windows.arguments import check_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from mpishare.backends.cuda import CudaBackend
    from mpishare.backends.cuda_memory import CudaMemory
    from mpishare.memory.fd_client import FdClient
    from mpishare.view.readers import Frame, Reader

_PAUSE_S = 0.0005
# Copies in a row of snapshots that are overwritten meanwhile, before the core is yielded.
_TRIES = 16


class Attached:
    """A named window, seen from outside its job. Made by `attach`; all calls are local.

    Attributes
    ----------
    name, job : str
        Of the window.
    shape : tuple of int
        Of the whole, or of the first rank's segment where each rank has one.
    dtype : numpy.dtype
        Of the elements.
    ranks : tuple of int
        Of the node, that have a segment.
    """

    def __init__(
        self,
        visit: FdClient,
        window: Description,
        fds: list[int],
        name: str,
        job: str,
        timeout_s: float,
        writable: bool,
    ) -> None:
        self.name = name
        self.job = job
        self.dtype: np.dtype[Any] = window.dtype
        self._visit = visit
        self._timeout_s = timeout_s
        self._writable = writable
        self._segments = window.segments
        self.ranks: tuple[int, ...] = tuple(segment.rank for segment in self._segments)
        self.shape: tuple[int, ...] = self._segments[0].layout.shape
        self._lock = threading.RLock()
        self._arrays: dict[int, Any] = {}
        self._memories: list[CudaMemory] = []
        self._why_not_live = window.why_not_live
        self._why_not_here = ""  # empty unless frames of GPUs come through host memory
        self._lag = window.lag
        self._why_closed = f"{name!r} is closed"
        self._cursor = 0  # of a channel: the number of the last frame that was read
        self._is_closed = False
        self._is_over = False
        self._thread: threading.Thread | None = None
        on_gpu = self._read_on_gpu(fds[0], window) if window.backend == "cuda" else None
        self._reader: Reader = on_gpu or HostReader(fds[0], window)
        if self._why_not_here:
            if self._lag:
                raise UnsupportedError(
                    f"attach({name!r}) failed: it is a channel on GPUs, whose frames cannot be "
                    f"mapped here: {self._why_not_here}. Attach where its producer's GPU is "
                    "visible."
                )
            visit.ask({"wants_host_copies": True})
        if self._lag:  # the first frame is the next that is put from now on
            self._cursor = max(self._reader.numbers().values())
        for segment, fd in zip(self._segments, fds[1:], strict=False):  # on the host alone
            self._arrays[segment.rank] = map_file(segment, fd, is_writable=writable)
        if on_gpu is not None:
            self._thread = threading.Thread(
                target=self._unmap_in_time, args=[on_gpu], name="mpishare-attached", daemon=True
            )
            self._thread.start()

    @property
    def array(self) -> Any:
        """The live memory of the whole, or of the first rank's segment; see `segment`."""
        return self.segment(self.ranks[0])

    def segment(self, rank: int) -> Any:
        """Return the live memory of a rank's segment: what the job writes is seen at once.

        Nothing orders this process and the job: an array may hold parts of two steps. A frame of
        `latest` does not.

        Returns
        -------
        cupy.ndarray or numpy.ndarray
            NumPy's is read-only, unless `attach` was called with ``writable=True``; CuPy has no
            such arrays. It stays mapped as long as it is held.

        Raises
        ------
        ClosedError
            If the job has ended or closed the window, or if this object is closed.
        UnsupportedError
            If this process cannot map the memory of all ranks: it does not see their GPUs.
        ValueError
            If that rank has no segment.
        """
        with self._lock:
            self._check()
            if self._why_not_live:
                raise UnsupportedError(
                    f"the live memory of {self.name!r} cannot be mapped here: "
                    f"{self._why_not_live}. Snapshots are there: latest()."
                )
            if rank not in self._arrays:
                raise ValueError(f"{self.name}: rank {rank!r} has no segment; {self.ranks} do")
            return self._arrays[rank]

    def latest(self, timeout_s: float | None = None) -> Frame:
        """Return the newest snapshot that is complete on all ranks; wait for the first.

        Host-blocking, but for no longer than a copy takes where there is one.

        Parameters
        ----------
        timeout_s : float, seconds, optional
            How long to wait for the first snapshot. Default: as `attach`.

        Raises
        ------
        PeerTimeout
            If there is none yet, or if they come faster than they can be copied.
        ClosedError
            If the job has ended or closed the window, or if this object is closed.
        UnsupportedError
            If this process does not see the GPU, and the job has no room for copies on the host;
            and of a channel.
        TypeError, ValueError
            If `timeout_s` is not a positive number, at most 1e9.
        """
        wait_s = self._timeout_s if timeout_s is None else timeout_s
        require_duration("latest failed: ", wait_s)
        found: list[Frame] = []
        self._check()
        if self._lag:
            raise UnsupportedError(
                f"{self.name!r} is a channel, whose frames come one by one: for frame in there"
            )

        def look() -> None:
            self._check()
            self._check_room()

        if not poll(lambda: self._read(0, found), wait_s, look, pause_s=_PAUSE_S):
            raise self._late(wait_s)
        return found[0]

    def __iter__(self) -> Iterator[Frame]:
        """Iterate over the snapshots, from the newest on, each at most once; some are skipped.

        Waits for the next one as long as it takes; ends when the job closes the window or ends. Of
        a channel it yields every frame that was put since `attach`, also in several loops, and ends
        behind the last, once the producer has ended or closed the channel.

        Raises
        ------
        ClosedError
            If a frame of a channel was overwritten before it could be read: this process was too
            slow, and is cut off. Also behind the last frame that came, if the job was killed,
            failed or exited before it ended the channel.
        """
        number = self._cursor
        if self._lag:
            self._check_open()
        while (frame := self._next(number)) is not None:
            number = frame.number
            if self._lag:
                self._cursor = number
            yield frame

    def close(self) -> None:
        """Release the window. May be repeated; arrays that are held stay mapped.

        On CUDA the job keeps the memory for them, and knows this process as a viewer until then.
        """
        self._is_closed = True
        self._unmap()

    def __enter__(self) -> Self:
        """Return the window; ClosedError if it is closed."""
        self._check()
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the window."""
        self.close()

    def __reduce__(self) -> Any:
        """Attach to the same window where it is unpickled."""
        return partial(attach, self.name, job=self.job, writable=self._writable), ()

    def __repr__(self) -> str:
        state = ", closed" if self._is_closed else ", job ended" if self._is_over else ""
        return (
            f"<mpishare window {self.name!r} of job {self.job}: shape={self.shape}, "
            f"dtype={self.dtype}, ranks={self.ranks}{state}>"
        )

    # --- making

    def _read_on_gpu(self, fd: int, window: Description) -> CudaReader | None:
        """Map the segments, and the copies of them, on this process's GPU: all of them or none."""
        try:
            backend, hidden = open_gpu([segment.uuid for segment in self._segments])
        except (UnsupportedError, CudaError) as error:
            self._why_not_here = str(error).rstrip(".")
            self._why_not_live = self._why_not_live or self._why_not_here
            return None
        self._visit.ask({"maps": True})
        reader = CudaReader(fd, window, backend)
        if why := self._why_not_mapped(backend, reader, hidden):
            reader.close(None)
            self._arrays.clear()
            while self._memories:
                self._memories.pop().close()
            self._visit.ask({"maps": False})
            self._why_not_here = why
            self._why_not_live = self._why_not_live or why
            return None
        return reader

    def _why_not_mapped(self, backend: CudaBackend, reader: CudaReader, hidden: set[str]) -> str:
        """Map what can be; return why not all of it can.

        Where ``CUDA_VISIBLE_DEVICES`` alone hides a GPU, its memory can be mapped; where a control
        group hides it, it cannot.
        """
        if self._why_not_live:  # then their snapshots alone
            return reader.why_not_mapped(hidden)
        try:
            for segment in self._segments:
                nbytes = max(segment.layout.nbytes, 1)
                memory = backend.open(segment.token, nbytes, segment.uuid)
                self._memories.append(memory)
                self._arrays[segment.rank] = memory.view(segment.layout)
        except CudaError as error:
            return f"{str(error).rstrip('.')} (rank {segment.rank})"
        return ""

    # --- reading

    def _next(self, than: int) -> Frame | None:
        """Wait for a frame whose number is above `than`; return None behind the last one."""
        found: list[Frame] = []

        def has_next() -> bool:
            return self._read(than, found) or self._reader.last() == than or self._look_over()

        if self._is_closed:
            return None
        poll(has_next, math.inf, self._check_room, pause_s=_PAUSE_S)
        if found or self._read(than, found):  # the last one, after the end
            return found.pop()
        if self._lag and not self._is_closed and self._reader.last() != than:
            raise ClosedError(
                f"the job of {self.name!r} is gone, but the channel was not ended behind frame "
                f"{than}: later ones may be missing. It was killed or failed, or exited without "
                "close()."
            )
        return None

    def _read(self, than: int, found: list[Frame]) -> bool:
        """Add the newest snapshot to `found`, if its number is above `than`."""
        for _ in range(_TRIES):
            with self._lock:
                frame = self._reader.read(than)
            if frame is None:
                return False
            if frame is not OVERWRITTEN:
                found.append(frame)
                return True
            if self._lag:
                self._cut_off()
        return False

    def _cut_off(self) -> None:
        """Close this process's side of a channel that it read too slowly."""
        missed = max(self._reader.numbers().values()) - self._lag - self._cursor
        self._why_closed = (
            f"{self.name!r} has cut off this process, which was too slow: it missed {missed} "
            f"frames from number {self._cursor + 1} on, of which the channel keeps {self._lag}. "
            "Read faster, or make the channel with a larger lag=. attach() again goes on with the "
            "next frame."
        )
        self.close()
        raise ClosedError(self._why_closed)

    def _look_over(self) -> bool:
        """Whether the job has closed the window, or has ended."""
        if not self._is_over and not self._is_closed:
            self._is_over = self._visit.is_over()
        return self._is_over or self._is_closed

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError(self._why_closed)

    def _check(self) -> None:
        self._check_open()
        if self._look_over():
            raise ClosedError(f"the job of {self.name!r} has ended, or has closed the window")

    def _check_room(self) -> None:
        ranks = self._reader.failed() if self._why_not_here else []
        if ranks:
            raise UnsupportedError(
                f"no snapshots of {self.name!r} here: {self._why_not_here}, and ranks {ranks} have "
                "no room in host memory for copies (/dev/shm; the job's log says more)"
            )

    def _late(self, wait_s: float) -> PeerTimeout:
        numbers = self._reader.numbers()
        taken = ", ".join(f"rank {rank}: {number}" for rank, number in numbers.items())
        without = [rank for rank, number in numbers.items() if not number]
        why = (
            "the job has to call window.snapshot() on these ranks"
            if without
            else "they come faster than they can be copied, or ranks are more than two apart"
        )
        what = f"no snapshot of {self.name!r} that is whole on all ranks"
        return late(what, wait_s, f". Newest ones: {taken}; {why}.", without)

    # --- release

    def _unmap_in_time(self, reader: CudaReader) -> None:
        """In a thread: when the window closes, unmap before its owners free the memory."""
        reader.backend.enter_thread()
        self._visit.wait_until_over()
        self._is_over = True
        self._unmap()

    def _unmap(self) -> None:
        """Unmap memory without arrays, and end the lease when no memory is left."""
        with self._lock:
            self._arrays.clear()
            rest = self._lag and not self._is_closed
            self._reader.close(self._cursor if rest else None)
            self._memories = [memory for memory in self._memories if not memory.close()]
            for memory in self._memories:
                memory.when_dropped(self._unmap)
            if self._memories:
                return
            self._visit.hang_up()  # the thread wakes up, and calls this method too
            if self._is_over or self._thread is None:
                self._visit.close()


def attach(
    name: str,
    *,
    job: str | int | None = None,
    timeout_s: float = 10.0,
    wait_s: float = 0.0,
    writable: bool = False,
) -> Attached:
    """Attach to a named window of a job on this machine. Local, host-blocking: some milliseconds.

    Needs no MPI and starts none. The job never waits for attached processes. On CUDA, where this
    process sees a GPU, it makes a context on the first of the window's that it sees, else on its
    own first, and makes that one current. Where it cannot map the memory of all ranks, it maps none
    and gets snapshots through host memory, as NumPy arrays: the first that the job takes some
    milliseconds after this call, when the memory for them is pinned.

    Parameters
    ----------
    name : str
        As given to `Node.allocate`, `Node.allocate_each` or `Node.share`.
    job : str or int, optional
        The scheduler's number of the job, else the process identifier of the node's leader.
        Default: the only job of this user that has such a window.
        ``python -m mpishare.info --attachable`` lists them.
    timeout_s : float, seconds
        For the answer of the job, and the default of `Attached.latest`. A job that is stopped gets
        that long to answer even where `wait_s` is shorter.
    wait_s : float, seconds
        How long to wait for a window that is not there yet; ``math.inf``: until it is. Windows of
        other users do not count, one that is closed meanwhile is waited for anew, and several jobs
        are an error at once. It is found within 20 ms; meanwhile no job is asked anything.
    writable : bool
        Whether live NumPy arrays may be written. Nothing orders such writes.

    Raises
    ------
    HandleError
        If there is no such window by then, several jobs have one, or the job runs another version.
    PeerTimeout
        If the job does not answer.
    UnsupportedError
        If it has too many visitors.
    TypeError, ValueError
        If `name`, `timeout_s` or `wait_s` cannot be one: a name has 1 to 40 letters, digits, '.',
        '_' or '-', a timeout is positive and at most 1e9, a wait may also be 0 or infinite.
    """
    check_name("attach", name)
    require_duration("attach failed: ", timeout_s)
    require_wait("attach failed: ", wait_s)
    end, of_job = time.monotonic() + wait_s, None if job is None else job_text(job)
    while True:
        window, visit = find(name, of_job, timeout_s, max(end - time.monotonic(), 0.0))
        with contextlib.ExitStack() as undo:
            undo.callback(visit.close)
            try:
                described = Description.ask(visit, attaches=True)
                with _files(visit, described.n_files) as fds:
                    there = Attached(visit, described, fds, name, window.job, timeout_s, writable)
            except HandleError as error:
                if window in listed() or time.monotonic() >= end:
                    raise HandleError(f"attach({name!r}) failed: {error}") from None
                continue  # it was closed meanwhile
            undo.pop_all()
        return there


@contextlib.contextmanager
def _files(visit: FdClient, count: int) -> Iterator[list[int]]:
    """Ask for so many descriptors, which are closed in the end."""
    fds: list[int] = []
    try:
        while len(fds) < count:
            n_files = min(count - len(fds), MAX_FDS)
            fds += visit.ask({"fds": len(fds)}, n_files=n_files)[1]
        yield fds
    finally:
        for fd in fds:
            os.close(fd)

"""Windows: memory that one rank allocates and every rank of the node maps."""

from __future__ import annotations

import logging
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.coordination.mpi_agreement import never_free
from mpishare.errors import UnsupportedError, closed, format_nbytes
from mpishare.memory.export import Export, make_export
from mpishare.memory.handle import Handle
from mpishare.memory.memory import WindowPart
from mpishare.runtime import ranges
from mpishare.runtime.context import NodeObject
from mpishare.windows.epochs import Epochs
from mpishare.windows.publisher import warn_if_kept

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mpishare.coordination.counters import Counters
    from mpishare.memory.memory import ArrayLayout, Memory
    from mpishare.memory.types import AnyArray, Stream
    from mpishare.runtime.context import NodeContext
    from mpishare.windows.publisher import Publication

log = logging.getLogger("mpishare.window")


class Window(Epochs, NodeObject):
    """A shared allocation, with the epochs that order access to it.

    Made by `Node.allocate`, `Node.allocate_each`, `Node.share` and `Node.share_each`.
    Calls raise `ClosedError` once the window is closed, and `PeerTimeout` or `PeerError` where a
    rank that they wait for is gone or late.

    Attributes
    ----------
    name : str
        As given; else ``window 3``: the number is the same on every rank, and never used again.
    shape : tuple of int
        Of `array`.
    dtype : numpy.dtype
        Of the elements.
    nbytes : int, bytes
        Of `array`.
    owner : int or None
        The rank that allocated or shared it, in ``node.comm``; None where each rank has a segment.
    readonly : bool
        Whether it was shared with ``readonly=True``.
    """

    def __init__(
        self,
        context: NodeContext,
        counters: Counters,
        segments: Mapping[int, ArrayLayout],
        memories: Mapping[int, Memory],
        handles: Mapping[int, str],
        owner: int | None,
        publication: Publication | None = None,
        *,
        is_part: bool = False,
        readonly: bool = False,
    ) -> None:
        self._number = context.next_number("window")
        name = publication.name if publication else f"window {self._number}"
        super().__init__(context, counters, name)
        self._publication = publication
        self._handles = handles
        self._context = context
        self._memories: list[Memory | None] = [memories.get(rank) for rank in range(context.size)]
        self._segments = segments
        self._arrays: dict[int, Any] = {}
        self._lent: Any = None
        self._viewers: list[int] = []
        self._device: Any = None  # a `WindowDevice`, if the window has signals
        self._is_part = is_part
        self._home = context.rank if owner is None else owner
        self.owner, self.readonly = owner, readonly
        home = segments[self._home]
        self.shape, self.dtype, self.nbytes = home.shape, home.dtype, home.nbytes
        context.register(self, is_part=is_part)
        ranges.bind(self, "fence", "post", "start", "complete", "wait")
        if log.isEnabledFor(logging.INFO):  # `Node.share_all` makes hundreds
            log.info(
                "%s made: shape %s, dtype %s, %s, %s",
                self.name,
                self.shape,
                self.dtype,
                format_nbytes(self.nbytes),
                "one segment per rank" if owner is None else f"of rank {owner}",
            )

    @property
    def array(self) -> AnyArray:
        """The whole window, or this rank's own segment where each rank has one. Local.

        Local. Only in-place assignment is allowed: ``window.array += 1``.
        """
        return self.segment(self._home)

    @array.setter
    def array(self, value: Any) -> None:
        if value is not self.segment(self._home):
            raise AttributeError(
                f"{self.name}: array is shared memory and cannot be replaced. Write into it: "
                "window.array[...] = values"
            )

    def segment(self, rank: int) -> AnyArray:
        """Return that rank's segment as an array of this rank: the same bytes, no copy.

        Local; does not block.

        Parameters
        ----------
        rank : int
            In ``node.comm``. Of a window with an owner, only the owner has a segment: the whole.

        Returns
        -------
        cupy.ndarray or numpy.ndarray
            On this rank's own device. Valid as long as it is held, also after `close`. NumPy's is
            read-only where the window is.

        Raises
        ------
        ValueError
            If that rank has no segment here.
        """
        if self._is_closed:
            raise closed(self.name)
        if rank not in self._arrays:
            is_rank = isinstance(rank, int | np.integer) and rank in self._segments
            memory = self._memories[rank] if is_rank else None
            if memory is None:
                raise ValueError(
                    f"{self.name}: rank {rank!r} has no segment; ranks {[*self._segments]} do. "
                    f"Here .array is that of rank {self._home}"
                )
            self._arrays[rank] = memory.view(self._segments[rank])
        return self._arrays[rank]

    def export(self, rank: int | None = None) -> Export:
        """Return a segment's memory in a form that C and C++ programs open by ``mpishare_open.h``.

        Local; does not block. Any process of this user on this machine may open it while the window
        is open; nothing orders its accesses. What was opened on the host stays mapped there; on a
        GPU the program must close it before the window is closed.

        Parameters
        ----------
        rank : int, optional
            Whose segment. Default: as of `array`.

        Returns
        -------
        Export
            Its ``str`` is a line of text for ``mpishare_parse``. `mpishare.device.include` tells
            the folder of the header.

        Raises
        ------
        UnsupportedError
            On the host, if mpishare allocated the window without ``name=``. For memory that was
            shared in place: if it is a part of another window, has no descriptor, or has several.
            If `Node.share_all` copied it, together with others.
        HandleError
            If the rank's process cannot be seen: it has ended, or has another PID namespace.
        ValueError
            If that rank has no segment here.
        """
        self._check()
        rank = self._home if rank is None else rank
        self.segment(rank)  # raises where it has none
        call = f"{self.name}: export"
        if not self._handles[rank]:
            raise UnsupportedError(
                f"{call} failed: Node.share_all copied it into memory that it shares with other "
                "windows. Share it alone, by node.share"
            )
        handle = Handle.unpack(self._handles[rank])
        path = "" if self._publication is None else self._publication.paths[rank]
        return make_export(call, handle, path)

    @property
    def device(self) -> np.ndarray[Any, Any]:
        """The window as an argument of kernels that include ``<mpishare.cuh>``.

        Local. One record for NumPy and CuPy, which kernels take by value as a
        ``mpishare::Device``; its field ``self`` is the address of a copy in GPU memory. For
        `Node.launch`.

        Raises
        ------
        UnsupportedError
            On the host backend, and if the window was made without ``signals=``.
        """
        self._check()
        if self._device is not None:
            return self._device.record  # type: ignore[no-any-return]
        if not self._context.backend.has_streams:
            raise UnsupportedError(
                f"{self.name}: device failed: the host backend has no kernels, which are on GPUs "
                "alone. Order accesses here by fence(), or by post, start, complete and wait"
            )
        raise UnsupportedError(
            f"{self.name}: device failed: it has no signals. Make the window by "
            "node.allocate_each(shape, dtype, signals=8)"
        )

    def __getitem__(self, index: Any) -> Any:
        """Raise `TypeError`: index `array` instead."""
        raise TypeError(f"{self.name} is a window, not an array: read window.array[...]")

    def __setitem__(self, index: Any, value: Any) -> None:
        """Raise `TypeError`: index `array` instead."""
        raise TypeError(f"{self.name} is a window, not an array: write window.array[...] = values")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Return `array` for NumPy: the same memory. `TypeError` where it is on a GPU."""
        if self._context.backend.has_streams:
            raise TypeError(
                f"{self.name} is in GPU memory, which NumPy cannot read. Copy it to the host: "
                "window.array.get()"
            )
        if copy is None:  # NumPy 1 has no such value
            return np.asarray(self.array, dtype=dtype)
        return np.array(self.array, dtype=dtype, copy=copy)

    def __dlpack__(self, **options: Any) -> Any:
        """Return `array` for any library that supports DLPack: the same memory."""
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[Any, Any]:
        """Return the device of `array` for DLPack."""
        return self.array.__dlpack_device__()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The CUDA array interface of `array`; there is none on the host backend.

        From then on the window's memory stays mapped as long as the window object is held.
        """
        if not self._context.backend.has_streams:
            raise AttributeError(f"{self.name} is not in GPU memory")
        # Users of the interface hold this object, not the array.
        self._lent = self.array
        interface: dict[str, Any] = self._lent.__cuda_array_interface__
        return interface | {"data": (interface["data"][0], self.readonly)}

    def snapshot(self, stream: Stream | None = None, **numbers: Any) -> None:
        """Copy this rank's segment as it is now, for processes that `attach`.

        Local; on CUDA stream-ordered, it does not block, and waits neither for a viewer nor for
        another rank. The first call takes memory for three copies of the segment; a viewer sees
        number n once every rank that has a segment has made its n-th call. On a rank without a
        segment it has no effect.

        Parameters
        ----------
        stream : stream, optional
            As of `fence`.
        **numbers : int, float or bool
            What the viewer finds beside the frame in `Frame.numbers`: the time, the step. Names may
            differ from call to call; names and numbers together take at most 992 bytes as text.

        Raises
        ------
        TypeError, ValueError
            If one of the numbers is none, or if they are too long; the call counts all the same.
        UnsupportedError
            If the window has no name, if there is no room in /dev/shm for the copies, or if the
            stream is being captured.
        CudaError
            If there is not that much memory on the GPU.
        """
        self._check()
        if self._publication is None:
            raise UnsupportedError(
                f"{self.name}: snapshot failed: nobody can attach to a window that has no name. "
                "Make it with name='...'."
            )
        if self._home == self._context.rank:
            self._publication.take(self.segment(self._home), self._chain, stream, numbers)

    def close(self) -> None:
        """Unmap the window on all ranks, then free it.

        Collective, host-blocking: waits for this process's streams and for the other ranks. Closing
        twice has no effect. Arrays that are still held stay valid, and keep their memory mapped; a
        `ResourceWarning` names the window, unless the node closes it. The same holds where
        processes outside the job map memory of it on a GPU and have not released it after 3 s.
        """
        if not self._is_closed:
            with self._context.agreement.collective():
                close_windows(self._context, [self])

    def _abandon(self) -> None:
        self._is_closed = True
        if self._publication is not None:
            self._publication.abandon()
        never_free(self._memories)  # a signal handler leaves the node in the midst of calls
        self._arrays.clear()
        self._forget()

    def __reduce__(self) -> Any:
        """Reduce to an attached window, for another process of this machine."""
        if self._publication is None:
            raise TypeError(
                "an mpishare Window cannot be pickled: it belongs to one process. Give it a name "
                "(name='...'): then it becomes an attached one on the other side"
            )
        # Writable, since its job passes it on for use.
        writable = not self.readonly
        return self._publication.reduce(writable=writable)

    def __repr__(self) -> str:
        name = self.name.capitalize() if self._publication is None else f"Window {self.name!r}"
        return (
            f"<mpishare.{name}: shape={self.shape}, dtype={self.dtype}, "
            f"owner={self.owner}{', readonly' if self.readonly else ''}{self._state()}>"
        )

    def _let_go(self) -> bool:
        self._arrays.clear()
        self._lent = None
        return not self._is_held()

    def _is_held(self) -> bool:
        return any(memory is not None and memory.is_held for memory in self._memories)

    def _unmap(self, rank: int) -> bool:
        memory = self._memories[rank]
        if memory is not None and memory.close():
            self._memories[rank] = None
        return self._memories[rank] is None

    def _release_again(self) -> bool:
        return all(_release(self._context, [self]))

    def _forget(self) -> None:
        self._context.unregister(self)
        self._end()


def _refuse_operator(window: Window, *_: Any) -> Any:
    raise TypeError(f"{window.name} is a window, not an array: compute with window.array")


for _operator in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    setattr(Window, f"__{_operator}__", _refuse_operator)
    setattr(Window, f"__r{_operator}__", _refuse_operator)


def close_in_turn(context: NodeContext, children: Sequence[NodeObject]) -> None:
    """Close objects of a node in their order. Collective, host-blocking.

    Windows that follow each other are closed together, unless one is a part of another, which needs
    it: an agreement of the ranks lasts until the last of them has got a core.
    """

    def is_alone(child: NodeObject) -> bool:
        is_part = any(isinstance(memory, WindowPart) for memory in child._memories)
        return is_part or not isinstance(child, Window)

    for are_alone, group in groupby(children, is_alone):
        if are_alone:
            for child in group:
                child.close()
        elif windows := [child for child in group if not child.is_closed]:
            close_windows(context, windows)


def close_windows(context: NodeContext, windows: Sequence[Any]) -> None:
    """Close open windows together, none a part of another. Collective; see `Window.close`."""
    for window in windows:
        window._check()
        if window._device is not None:
            window._device.close()
    context.begin_close(f"{windows[0].name}: close")
    for window in windows:
        window._is_closed = True
        window._arrays.clear()
    held = [window._is_held() for window in windows]
    gone = [False] * len(windows)
    try:
        gone = _release(context, windows, [window._counters for window in windows])
    finally:
        # After an error too, which all ranks have: this memory must not be found again.
        for window, is_gone in zip(windows, gone, strict=True):
            window._forget()
            if not is_gone:
                context.retained.append(window._release_again)
    for window, is_gone, is_held in zip(windows, gone, held, strict=True):
        log.debug("%s closed%s", window.name, "" if is_gone else ": its memory is held")
        if not window._is_part:  # of a channel: a loop over its frames keeps the last one
            name, viewers = f"{window.name} of shape {window.shape}", window._viewers
            visitors = viewers if context.rank == 0 else []
            warn_if_kept(context, name, visitors, is_held=is_held, stacklevel=3)


def _release(
    context: NodeContext, windows: Sequence[Window], counters: Sequence[Counters] = ()
) -> list[bool]:
    """Unmap and free memory without arrays; return for each window whether all of it is free.

    Collective, host-blocking. Part of `close`, and without counters once more when the node is
    closed.
    """
    for window in windows:
        if window._publication is not None:
            window._viewers = window._publication.detach_viewers(f"{window.name}: close")

    rank, others = context.rank, context.agreement.others

    def unmap_others() -> list[list[int]]:
        """Return for each window the ranks whose arrays are still held."""
        return [[peer for peer in others if not window._unmap(peer)] for window in windows]

    def free(kept: list[list[list[int]]]) -> list[bool]:
        is_kept = [any(rank in ranks for ranks in each) for each in zip(*kept, strict=True)]
        pairs = zip(windows, is_kept, strict=True)
        return [
            not (window._viewers or kept_here) and window._unmap(rank)
            for window, kept_here in pairs
        ]

    call = f"{windows[0].name}: close"
    freed = context.close_in_order(call, unmap_others, free, counters)
    return [all(of_ranks) for of_ranks in zip(*freed, strict=True)]

"""What the ranks of a node make together: windows, channels, pools, events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from mpishare import allocate, share
from mpishare.channel import Channel, make_channel
from mpishare.event import Event, make_event
from mpishare.pool import Pool, make_pool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.context import NodeContext
    from mpishare.window import Window


class Factory(ABC):
    """The calls of a `Node` that make an object on all of its ranks."""

    _context: NodeContext

    @property
    @abstractmethod
    def leader(self) -> int:
        """The rank in `comm` that allocates where no other is named."""

    def allocate(
        self,
        shape: Any,
        dtype: Any = float,
        *,
        fill: Any = None,
        owner: int | None = None,
        name: str | None = None,
    ) -> Window:
        """Allocate memory once and map it on every rank.

        Collective, host-blocking. All arguments are the same on all ranks.

        Parameters
        ----------
        shape : int or tuple of int
            Of the whole; 0 is allowed.
        dtype : dtype
            Of the elements: anything without Python objects on the host backend, what CuPy has on
            CUDA.
        fill : scalar, optional
            What every element is set to before the call returns. Default: nothing is set.
        owner : int, optional
            The rank in `comm` that allocates, on its GPU. Default: the leader.
        name : str, optional
            1 to 40 letters, digits, '.', '_' or '-'. Processes of this user on this machine may
            then `attach` by it, until the window is closed.

        Returns
        -------
        Window
            Its `array` is the whole, on every rank.

        Raises
        ------
        CudaError, UnsupportedError
            On the owner, if there is not that much memory.
        PeerError
            If that or anything else failed on another rank; nothing is left allocated.
        MismatchError
            If the arguments differ.
        ValueError
            If `fill` does not fit `dtype`, or another window of this job has the name.
        """
        return allocate.allocate(self._context, shape, dtype, fill, owner, name=name)

    def allocate_each(
        self, shape: Any, dtype: Any = float, *, fill: Any = None, name: str | None = None
    ) -> Window:
        """Allocate a segment on every rank, on its own GPU, and map all of them on every rank.

        Collective, host-blocking. The dtype is the same on all ranks; shapes may differ.

        Parameters
        ----------
        shape : int or tuple of int
            Of this rank's segment; 0 is allowed.
        dtype : dtype
            Of the elements.
        fill : scalar, optional
            What every element of this rank's segment is set to before the call returns.
        name : str, optional
            As of `allocate`.

        Returns
        -------
        Window
            Its `array` is this rank's segment, ``segment(rank)`` another's.

        Raises
        ------
        CudaError, UnsupportedError, PeerError, MismatchError, ValueError
            As `allocate`.
        """
        return allocate.allocate_each(self._context, shape, dtype, fill, name=name)

    def share(
        self,
        source: Any,
        *,
        owner: int | None = None,
        copy: bool | None = True,
        name: str | None = None,
    ) -> Window:
        """Share what one rank has, or computes, as a window of its shape, dtype and memory order.

        Collective, host-blocking: also waits for all streams of the owner where nothing is copied.

        Parameters
        ----------
        source : array, or callable without arguments that returns one
            Read, or called, on the owner alone; the others' is ignored.
        owner : int, optional
            A rank in `comm`, the same on all ranks. Default: the leader.
        copy : {True, False, None}
            The same on all ranks. True: new memory is allocated, and the array copied into it.
            False: the window is the array's own memory, strides and all, and nothing is allocated;
            see Notes. None: as False where that works, else as True, with a warning on the logger
            ``mpishare.window``.
        name : str, optional
            As of `allocate`.

        Raises
        ------
        UnsupportedError
            On the owner, if the array's memory was freed, or cannot be shared in place: which kind
            of memory it is, and what to do instead.
        TypeError
            On the owner, if the source is None, an int, or holds Python objects.
        Exception
            On the owner, whatever the callable raised.
        PeerError
            On the others, with the text of that exception.
        MismatchError
            If `owner` or `copy` differs.

        Notes
        -----
        In place (``copy=False``) works for any part of an open window of this node, also of another
        rank's segment; and on CUDA for memory on this rank's GPU: of ``cuMemAlloc`` (CuPy's and
        PyTorch's default allocators), of pools made for POSIX file descriptors (RMM, cuda.core) and
        of PyTorch's expandable segments. The window holds the array until it is closed. A handle of
        ``cuMemAlloc`` opens the allocator's whole block to the other ranks, not only the array.
        Negative strides are refused. Closing the window leaves the array as it is.
        """
        return share.share(self._context, source, owner, copy, name=name)

    def share_each(
        self, source: Any, *, copy: bool | None = True, name: str | None = None
    ) -> Window:
        """Share every rank's own array as its segment of one window.

        Collective, host-blocking, as `share`. The dtype is the same on all ranks; shapes, strides
        and kinds of memory may differ.

        Parameters
        ----------
        source : array, or callable without arguments that returns one
            Of this rank.
        copy : {True, False, None}
            As for `share`; None decides for each rank.
        name : str, optional
            As of `allocate`.

        Returns
        -------
        Window
            Its `array` is this rank's segment, ``segment(rank)`` another's. A halo field in it is
            treated as one of `allocate_each`.

        Raises
        ------
        UnsupportedError, TypeError, PeerError, MismatchError
            As `share`.
        """
        return share.share_each(self._context, source, copy, name=name)

    def event(self, owner: int | None = None, waiters: Sequence[int] | None = None) -> Event:
        """Make an event that one rank records and streams of others wait for.

        Collective, host-blocking. All arguments are the same on all ranks.

        Parameters
        ----------
        owner : int, optional
            The rank in `comm` that records. Default: the leader.
        waiters : sequence of int, optional
            The ranks that wait. Default: all others.
        """
        return make_event(self._context, self.leader if owner is None else owner, waiters)

    def pool(self, *, owner: int | None = None, max_nbytes: int | None = None) -> Pool:
        """Make a pool of memory that one rank allocates array by array, and others open.

        Collective once, host-blocking: some milliseconds. All arguments are the same on all ranks.
        After that the owner allocates, and the others open, without each other: for sizes that
        nobody else knows, and for many arrays.

        Parameters
        ----------
        owner : int, optional
            The rank in `comm` that allocates, on its GPU. Default: the leader.
        max_nbytes : int, bytes, optional
            The most that the pool may hold. Default: what the GPU has; on the host backend what is
            free in /dev/shm now. Memory is taken when it is allocated, on CUDA in chunks of 8 MiB
            for arrays up to 512 KiB; what is given back is reused by the pool, and returns to the
            machine when the pool is closed.

        Raises
        ------
        UnsupportedError
            If memory pools cannot be shared between processes here, as on WSL2.
        PeerError, MismatchError
            As `allocate`.
        """
        return make_pool(self._context, self.leader if owner is None else owner, max_nbytes)

    def channel(
        self,
        shape: Any,
        dtype: Any = float,
        *,
        slots: int = 4,
        producer: int | None = None,
        consumers: Sequence[int] | None = None,
    ) -> Channel:
        """Make a channel: one rank streams arrays of one shape to others.

        Collective, host-blocking. All arguments are the same on all ranks. Where there is one
        consumer the slots lie in its memory, else in the producer's.

        Parameters
        ----------
        shape : int or tuple of int
            Of one frame; 0 is allowed.
        dtype : dtype
            Of the elements, as in `allocate`.
        slots : int
            How many frames the producer may be ahead of the slowest consumer; at least 1.
        producer : int, optional
            The rank in `comm` that puts. Default: the leader.
        consumers : sequence of int, optional
            The ranks that get. Default: all others. Where there are none, as on a node of one
            rank, the producer never waits, and nobody gets the frames.

        Raises
        ------
        CudaError, UnsupportedError, PeerError, MismatchError
            As `allocate`.
        """
        source = self.leader if producer is None else producer
        return make_channel(self._context, shape, dtype, slots, source, consumers)

"""The node: the ranks that share memory."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from mpishare.runtime import ranges
from mpishare.runtime.context import NodeObject
from mpishare.runtime.create import create_node, destroy_node
from mpishare.runtime.report import host_pairs
from mpishare.view.publication import Publication
from mpishare.windows.allocate import allocate
from mpishare.windows.channel import Channel
from mpishare.windows.event import Event
from mpishare.windows.launch import launch_kernel
from mpishare.windows.pool import Pool
from mpishare.windows.share import share
from mpishare.windows.share_all import share_all
from mpishare.windows.window import close_in_turn
from mpishare.windows.window_device import WindowDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

    from mpi4py import MPI

    from mpishare.backends import Device
    from mpishare.memory.types import Array, BackendName, DTypeLike, GivenDevice, Shape, Stream
    from mpishare.runtime.context import NodeContext
    from mpishare.runtime.report import Report
    from mpishare.windows.window import Window


class Node(NodeObject):
    """The ranks of a communicator that share memory with this one.

    Collective over the given communicator, host-blocking: some milliseconds on the host backend,
    0.1 to 1 s on CUDA, where every pair of ranks is tried once. Each rank gets the node it is on.
    Of ranks that are all in one open node already, about a millisecond: what that node has found
    out holds for them. Threads that make nodes at the same time have a communicator each.
    Collective calls of a node raise `PeerTimeout` or `PeerError` where a rank is gone or late.
    Calls that make an object may also raise the errors that `allocate` and `share` list.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        Over any number of nodes. It is duplicated; mpishare sends no message on it. Default:
        ``MPI.COMM_WORLD``.
    backend : {"auto", "cuda", "host"}
        ``"auto"`` is ``"cuda"`` where every rank has a GPU, else ``"host"``. The same on all ranks.
        The environment variable ``MPISHARE_BACKEND`` overrides it.
    device : int, str or cupy.cuda.Device, optional
        This rank's GPU: its ordinal here, or its UUID. Default: the one whose primary context is
        active already, else round robin over the ranks of the node. It is made the current one. On
        the host backend it is ignored, with a warning.
    timeout_s : float, seconds
        After this, a wait of the host for another rank raises `PeerTimeout`. At most 1e9.

    Attributes
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks of this node, for the user: mpishare sends no message on it.
    ranks : tuple of int
        For each rank of the node, its rank in the communicator that was given.

    Raises
    ------
    UnsupportedError
        If a launcher started several ranks that MPI does not connect, if there is a GPU but not the
        packages to use it, if /dev/shm is full or cannot be used, in a forked process, or while
        another thread makes a node on the same communicator.
    PeerError
        If another rank failed; `MismatchError` if threads of that kind have met.
    PeerTimeout
        If not all ranks call it. Where a rank dies while MPI splits communicators, a call without a
        deadline, the job is aborted at the deadline.
    """

    _context: NodeContext

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        *,
        backend: Literal["auto"] | BackendName = "auto",
        device: GivenDevice | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        self._context, self._shutdown = create_node(comm, backend, device, timeout_s)
        self._context.publish = Publication
        self.comm: MPI.Intracomm = self._context.comms[0]
        members = self._context.report.members
        self.ranks: tuple[int, ...] = tuple(member.given_rank for member in members)

    @property
    def rank(self) -> int:
        """The rank of this process in `comm`."""
        return self._context.rank

    @property
    def size(self) -> int:
        """The number of ranks of the node."""
        return self._context.size

    @property
    def leader(self) -> int:
        """The rank in `comm` that allocates memory by default: the lowest."""
        return self._context.report.leader

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the leader."""
        return self.rank == self.leader

    @property
    def backend(self) -> BackendName:
        """``"cuda"`` or ``"host"``, the same on every rank of the given communicator."""
        return self._context.backend.name

    @property
    def xp(self) -> ModuleType:
        """The array library: CuPy or NumPy."""
        return self._context.backend.xp

    @property
    def device(self) -> Device | None:
        """The GPU of this rank; None on the host backend."""
        return self._context.backend.device

    def report(self) -> Report:
        """Return which ranks share memory, by which route, and why others do not.

        Local: the probe ran when the node was made. ``str()`` is a text, `Report.pairs` data.
        """
        context, last = self._context, self._context.report
        context.report = replace(
            last,
            pairs=last.pairs or host_pairs(self.size),
            gpu_messages=context.gpu_messages,
        )
        return context.report

    def allocate(
        self,
        shape: Shape,
        dtype: DTypeLike = float,
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
            Of the elements: any without Python objects on the host backend, one of CuPy's on CUDA.
        fill : scalar, optional
            The value of every element when the call returns. Default: elements are not set.
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
            If that or another step failed on another rank; no memory is left allocated.
        MismatchError
            If the arguments differ.
        ValueError
            If `fill` does not fit `dtype`, or another window of this job has the name.
        """
        with self._making("allocate"):
            return allocate(self._context, shape, dtype, fill, name, owner=owner)

    def allocate_each(
        self,
        shape: Shape,
        dtype: DTypeLike = float,
        *,
        fill: Any = None,
        name: str | None = None,
        signals: int = 0,
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
            The value of every element of this rank's segment when the call returns.
        name : str, optional
            As of `allocate`.
        signals : int, optional
            The number of signals, zero at first, that each rank has for each other one: with them
            kernels of your own put, signal and wait; see `Window.device`. The same on all ranks.

        Returns
        -------
        Window
            Its `array` is this rank's segment, ``segment(rank)`` another's.
        """
        with self._making("allocate_each"):
            made = allocate(self._context, shape, dtype, fill, name, is_each=True, signals=signals)
        if signals and self._context.backend.has_streams:
            made._device = WindowDevice(self._context, made, int(signals))
        return made

    def share(
        self,
        source: Array | Callable[[], Any] | None,
        *,
        owner: int | None = None,
        copy: bool | None = True,
        name: str | None = None,
        readonly: bool = False,
    ) -> Window:
        """Share one rank's array, given or computed, in a window of its shape, dtype and order.

        Collective, host-blocking: also waits for all streams of the owner where the array is not
        copied.

        Parameters
        ----------
        source : array, or callable without arguments that returns one
            Read, or called, on the owner alone; the others' is ignored.
        owner : int, optional
            A rank in `comm`, the same on all ranks. Default: the leader.
        copy : {True, False, None}
            The same on all ranks. True: new memory is allocated, and the array copied into it.
            False: the window is the array's own memory, strides and all, without an allocation; see
            Notes. None: as False where that works, else as True, with a warning on the logger
            ``mpishare.window``.
        name : str, optional
            As of `allocate`.
        readonly : bool
            For a table that many ranks read; the same on all ranks. On the host backend its arrays
            are read-only on all ranks, the owner too, and stay so: a store is NumPy's `ValueError`.
            The other ranks map the memory read-only. The owner writes the array before, or
            returns it from the callable. With ``copy=False`` its own array stays as writable as it
            was, and what it stores there the others see. On CUDA no store is refused: neither
            CuPy nor mappings between processes have read-only memory; only libraries that take the
            window itself by its ``__cuda_array_interface__`` are told.

        Raises
        ------
        UnsupportedError
            On the owner, if the array's memory was freed, or cannot be shared in place: with the
            kind of memory, and the remedy.
        TypeError
            On the owner, if the source is None, an int, or holds Python objects.
        Exception
            On the owner, any exception of the callable.
        PeerError
            On the others, with the text of that exception.
        MismatchError
            If `owner`, `copy` or `readonly` differs, and no rank's own arguments are wrong.

        Notes
        -----
        In place (``copy=False``) works for any part of an open window of this node, also of another
        rank's segment; on the host backend for files that are mapped shared
        (``multiprocessing.shared_memory``, `numpy.memmap`, memfds), and for shared windows of MPI
        among ranks that have them; and on CUDA for memory on this rank's GPU: of ``cuMemAlloc``
        (CuPy's and PyTorch's default allocators), of pools made for POSIX file descriptors (RMM,
        cuda.core) and of PyTorch's expandable segments. The window holds the array until it is
        closed. A handle of ``cuMemAlloc`` opens the allocator's whole block to the other ranks, not
        only the array.
        Negative strides are refused. Closing the window leaves the array as it is.
        """
        with self._making("share"):
            return share(self._context, source, copy, name, owner=owner, readonly=readonly)

    def share_each(
        self,
        source: Array | Callable[[], Any],
        *,
        copy: bool | None = True,
        name: str | None = None,
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
        """
        with self._making("share_each"):
            return share(self._context, source, copy, name, is_each=True)

    def share_all(
        self,
        source: Any,
        *,
        owner: int | None = None,
        copy: bool | None = True,
        readonly: bool = False,
    ) -> Any:
        """Share many arrays of one rank at once: a tree of them, with a window for each.

        Collective, host-blocking, as `share`; one agreement and, for copies, one allocation.

        Parameters
        ----------
        source : dict, list or tuple of arrays, or callable without arguments that returns one
            Read, or called, on the owner alone; the others' is ignored. Dicts, lists and (named)
            tuples may be within each other; keys are str or int. Arrays that are the same memory in
            the same layout, as tied weights, become one window.
        owner : int, optional
            As of `share`.
        copy : {True, False, None}
            As of `share`; None decides for each array, and warns once.
        readonly : bool
            As of `share`, for all windows.

        Returns
        -------
        dict, list or tuple of Window
            In the form of the owner's tree, with plain dicts. Each window is closed on its own, or
            with the node; memory for copies is freed when the last of them is closed.

        Raises
        ------
        TypeError
            On the owner, if a leaf is no array, with its path: ``source['layer3'][1]``.

        Examples
        --------
        >>> with Node() as node:
        ...     weights = {"w": numpy.ones((2, 3)), "b": [numpy.zeros(3)]}
        ...     windows = node.share_all(weights if node.is_leader else None)
        ...     windows["w"].shape, windows["b"][0].array.tolist()
        ((2, 3), [0.0, 0.0, 0.0])
        """
        with self._making("share_all"):
            return share_all(self._context, source, owner, copy, readonly)

    def event(self, owner: int | None = None, waiters: Sequence[int] | None = None) -> Event:
        """Make an event that one rank records and streams of others wait for.

        Collective, host-blocking. All arguments are the same on all ranks.

        Parameters
        ----------
        owner : int, optional
            The rank in `comm` that records. Default: the leader.
        waiters : sequence of int, optional
            The ranks that wait. Default: all others.

        Raises
        ------
        UnsupportedError
            On CUDA, if the owner and a waiter have the same process id, in PID namespaces of their
            own.
        """
        with self._making("event"):
            return Event(self._context, owner, waiters)

    def pool(self, *, owner: int | None = None, max_nbytes: int | None = None) -> Pool:
        """Make a pool of memory that one rank allocates array by array, and others open.

        Collective once, host-blocking: some milliseconds. All arguments are the same on all ranks.
        After that the owner allocates, and the others open, each on its own: for sizes that only
        the owner knows, and for many arrays.

        Parameters
        ----------
        owner : int, optional
            The rank in `comm` that allocates, on its GPU. Default: the leader.
        max_nbytes : int, bytes, optional
            The size limit of the pool. Default: the memory of the GPU; on the host backend the free
            part of /dev/shm now. Memory is taken when it is allocated, on CUDA in chunks of 8 MiB
            for arrays up to 512 KiB; freed memory is reused by the pool, and returns to the machine
            when the pool is closed.

        Raises
        ------
        CudaError
            On a rank whose driver makes or imports no pool for other processes.
        """
        with self._making("pool"):
            return Pool(self._context, owner, max_nbytes)

    def channel(
        self,
        shape: Shape,
        dtype: DTypeLike = float,
        *,
        slots: int | None = None,
        producer: int | None = None,
        consumers: Sequence[int] | None = None,
        deal: bool = False,
        name: str | None = None,
        lag: int = 16,
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
        slots : int, optional
            Number of frames that the producer may be ahead of the slowest consumer; at least 1.
            Default: 4; where they are dealt, two for each consumer.
        producer : int, optional
            The rank in `comm` that puts. Default: the leader.
        consumers : sequence of int, optional
            The ranks that get. Default: all others. Where there are none, as on a node of one rank,
            the producer never waits, and the frames are lost.
        deal : bool
            False: every consumer gets every frame. True: each frame goes to one, the first that
            asks, as tasks of a server to its workers.
        name : str, optional
            As of `allocate`: a process that attaches gets every frame from then on, beside the
            consumers. The producer then copies each frame, and waits for no such process.
        lag : int, optional
            Number of frames that a process which attached may be behind, at most 4096; for one more
            than these there is memory. One that is slower is cut off.
        """
        with self._making("channel"):
            return Channel(self._context, shape, dtype, slots, producer, consumers, deal, name, lag)

    @contextmanager
    def _making(self, call: str) -> Iterator[None]:
        """Show a call that makes an object to profilers; leave the node if it ends here alone."""
        with self._context.agreement.collective(), ranges.span(f"Node.{call}"):
            yield

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        stream: Stream | None = None,
        *,
        shared_mem: int = 0,
    ) -> None:
        """Enqueue a kernel that puts, signals or waits by ``<mpishare.cuh>``.

        Local, stream-ordered; also while the stream is being captured into a graph. All ranks make
        these calls in the same order, once each has compiled its kernel: the deadline of a wait
        runs while others compile. The kernel follows the last one that was launched so with one of
        its windows, on any stream. It is refused where its waits would hang: without MPS where
        ranks share a GPU, and with more blocks than run at once. Where a wait in it fails, the
        kernel goes on with false; then `synchronize`, every close and the next launch with the
        window raise here at once, all other calls within 0.1 s.

        Parameters
        ----------
        kernel : cupy.RawKernel
            Or a function of a ``cupy.RawModule``, compiled with ``mpishare.device.include()``.
        grid, block : tuple of int
            The blocks, and the threads of each.
        args : sequence
            As CuPy takes them, with `Window.device` of one window or more.
        stream : stream, optional
            Default: CuPy's current stream.
        shared_mem : int, bytes
            Dynamic shared memory of a block.

        Raises
        ------
        UnsupportedError
            If it would hang, or on the host backend, with the reason and the remedy.
        ValueError
            If no argument is the device of an open window of this node.
        PeerTimeout, PeerError
            If a rank is gone or late: also in a kernel that was launched before.
        """
        shared = self._context.report.time_sliced_gpus
        launch_kernel(self._context, kernel, grid, block, args, stream, shared_mem, shared)

    def barrier(self) -> None:
        """Wait on the host until every rank of the node has called it.

        Collective, host-blocking. Does not wait for the GPU: see `synchronize`.
        """
        self._context.agreement.meet("Node.barrier")

    def collect(self) -> None:
        """Close the objects of this node that all ranks have dropped.

        Collective, host-blocking. Calls that make an object of the node close them too.
        """
        with self._context.agreement.collective():
            self._context.begin("Node.collect", int)

    def synchronize(self, stream: Stream | None = None) -> None:
        """Wait on the host until all work on a stream is done, with the deadline.

        Local, host-blocking. Unlike the stream's own method it raises where the stream waits for a
        rank that is gone, and where a wait in a kernel of yours has failed. Give it the stream of
        kernels that Numba or Triton launched, unless that is CuPy's current one.

        Parameters
        ----------
        stream : stream, optional
            Default: CuPy's current stream. Ignored on the host backend.

        Raises
        ------
        PeerTimeout
            If a rank that the stream waits for died, or is late by more than the deadline.
        PeerError
            If such a rank left.
        """
        self._context.synchronize(stream, "Node.synchronize")

    def close(self) -> None:
        """Close the node and the objects made from it, newest first.

        Collective over the node, host-blocking; closing twice has no effect. Local where the node
        is broken: memory that other ranks may still map is left to the end of the process.

        Raises
        ------
        PeerError, PeerTimeout
            If a rank is gone or does not arrive; the node is closed nevertheless, by this rank
            alone.
        """
        if self._is_closed:
            return
        context, agreement = self._context, self._context.agreement
        if agreement.life.failure is not None:
            self._abandon()
            if not agreement.life.is_raised and agreement.block.is_mine:
                agreement.check()
            return
        agreement.check()
        context.to_warn = []
        try:
            close_in_turn(context, context.children)
            context.release_retained()
            destroy_node(context, self._shutdown)
        except BaseException as error:
            agreement.life.leave("Node.close", error)
            self._abandon()
            raise
        self._is_closed = True
        for comm in context.comms:
            comm.Free()
        texts, context.to_warn = context.to_warn, None  # a plan that has closed it warns behind
        for text in texts:
            warnings.warn(text, ResourceWarning, stacklevel=2)

    def _abandon(self) -> None:
        """Leave without the other ranks; free no memory that they may still map."""
        self._is_closed = True
        for child in self._context.children:
            child._abandon()
        self._context.fd_server.close()

    def _leave(self, error: BaseException) -> None:
        self._context.life.leave("its with block", error)
        self._abandon()

    def __repr__(self) -> str:
        failure = self._context.life.failure
        state = ", closed" if self._is_closed else ""
        if not state and failure is not None:
            state = f", broken by {type(failure).__name__}"
        return (
            f"<mpishare.Node: rank={self.rank} of {self.size}, backend={self.backend!r}, "
            f"device={self.device}{state}>"
        )


def require_node(call: str, node: Any) -> None:
    """Raise `TypeError` for what is no node."""
    if not isinstance(node, Node):
        raise TypeError(f"{call} failed: node must be an mpishare.Node, not {node!r}")

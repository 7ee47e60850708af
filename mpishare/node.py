"""The node: the ranks that share memory."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from mpishare.context import NotPicklable
from mpishare.errors import ClosedError
from mpishare.factory import Factory
from mpishare.setup.create import create_node, destroy_node

if TYPE_CHECKING:
    from types import ModuleType, TracebackType

    from mpi4py import MPI

    from mpishare.backends import Device
    from mpishare.setup.report import Report


class Node(Factory, NotPicklable):
    """The ranks of a communicator that share memory with this one.

    Collective over the given communicator, host-blocking: some milliseconds on the host backend,
    0.1 to 1 s on CUDA, where every pair of ranks is tried once. Each rank gets the node it is on.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        Over any number of nodes. It is duplicated; nothing is ever sent on it. Default:
        ``MPI.COMM_WORLD``.
    backend : {"auto", "cuda", "host"}
        ``"auto"`` is ``"cuda"`` where every rank has a GPU, else ``"host"``. The same on all ranks.
        The environment variable ``MPISHARE_BACKEND`` comes before it.
    device : int, str or cupy.cuda.Device, optional
        This rank's GPU: its ordinal here, or its UUID. Default: the one whose primary context is
        active already, else round robin over the ranks of the node. It is made the current one. On
        the host backend it is ignored, and a warning says so.
    timeout_s : float, seconds
        After this, a wait of the host for another rank raises `PeerTimeout`. At most 1e9.

    Attributes
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks of this node, for the user: mpishare sends nothing on it.
    ranks : tuple of int
        For each rank of the node, its rank in the communicator that was given.

    Raises
    ------
    UnsupportedError
        If a launcher started several ranks that do not know of each other, if there is a GPU but
        not the packages to use it, if /dev/shm is full or cannot be used, or in a forked process.
    PeerError
        If another rank failed.
    PeerTimeout
        If not all ranks call it. Where a rank dies in MPI's own splitting of communicators, which
        nothing else ends, the job is aborted at the deadline.
    """

    def __init__(
        self,
        comm: MPI.Comm | None = None,
        *,
        backend: str = "auto",
        device: Any = None,
        timeout_s: float = 300.0,
    ) -> None:
        parts = create_node(comm, backend, device, timeout_s)
        self._context = parts.context
        self._shutdown = parts.shutdown
        self._report = parts.report
        self._comms = parts.comms
        self._is_closed = False
        self.comm: MPI.Comm = parts.comms[0]
        self.ranks = tuple(member.given_rank for member in parts.report.members)

    @property
    def rank(self) -> int:
        """The rank of this process in `comm`."""
        return self._context.rank

    @property
    def size(self) -> int:
        """How many ranks the node has."""
        return self._context.size

    @property
    def leader(self) -> int:
        """The rank in `comm` that allocates what the node shares: the lowest."""
        return self._report.leader

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the leader."""
        return self.rank == self.leader

    @property
    def backend(self) -> str:
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

    @property
    def is_closed(self) -> bool:
        """Whether the node was closed."""
        return self._is_closed

    def report(self) -> Report:
        """Return which ranks share memory, by which route, and why others do not.

        Local: the probe ran when the node was made; the first call on a GPU takes 0.4 ms more, for
        a pool that is made and exported. ``str()`` is a text, `Report.pairs` data. Each call looks
        up the room in /dev/shm and the limits on memory: 1 ms.
        """
        backend = self._context.backend
        if backend.has_streams and self._report.exports_pools is None:
            self._report = replace(self._report, exports_pools=backend.exports_pools())
        if self._report.gpu_messages != self._context.gpu_messages:
            self._report = replace(self._report, gpu_messages=self._context.gpu_messages)
        around = self._report.surroundings
        if around is not None:
            self._report = replace(self._report, surroundings=around.with_room())
        return self._report

    def barrier(self) -> None:
        """Wait on the host until every rank of the node has called it.

        Collective, host-blocking. Waits for no GPU: see `synchronize`.

        Raises
        ------
        PeerError, PeerTimeout
            If a rank is gone or late.
        """
        context = self._context
        news = context.news(context.dropped)
        if context.agreement.meet("Node.barrier", has_news=bool(news)):
            context.dropped.close(context.agreement.step("Node.barrier", lambda: news), self.rank)

    def synchronize(self, stream: Any = None) -> None:
        """Wait on the host until all that was put on a stream is over, with the deadline.

        Local, host-blocking. Unlike the stream's own method it raises where the stream waits for a
        rank that is gone.

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

        Collective over the node, host-blocking; closing twice does nothing. Local where the node
        is broken: memory that other ranks may still map is left to the end of the process.

        Raises
        ------
        PeerError, PeerTimeout
            If a rank is gone or does not arrive; the node is closed all the same, by this rank
            alone.
        """
        if self._is_closed:
            return
        context, agreement = self._context, self._context.agreement
        if agreement.failure is not None:
            self._abandon()
            if not agreement.is_raised and agreement.is_own_process:
                agreement.check()
            return
        agreement.check()
        try:
            for child in context.children:
                child.close()
            context.release_retained()
            destroy_node(context, self._shutdown)
        except BaseException as error:
            agreement.leave("close()", error)
            self._abandon()
            raise
        self._is_closed = True
        context.agreement.fail(lambda: ClosedError("the node is closed"), fatal=False)
        for comm in self._comms:
            comm.Free()

    def _abandon(self) -> None:
        """Leave without the other ranks. Local; frees nothing that they may still map."""
        self._is_closed = True
        for child in self._context.children:
            child._abandon()
        self._context.descriptors.close()

    def __enter__(self) -> Self:
        """Return the node; raises if it is closed."""
        self._context.agreement.check()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the node; by an exception leave it without waiting for anyone, and say why."""
        if error is None:
            self.close()
        elif not self._is_closed:
            self._context.agreement.leave("its with block", error)
            self._abandon()

    def __repr__(self) -> str:
        """Name the node, this rank and the backend."""
        failure = self._context.agreement.failure
        state = ", closed" if self._is_closed else ""
        if not state and failure is not None:
            state = f", broken by {type(failure()).__name__}"
        return (
            f"<mpishare.Node: rank={self.rank} of {self.size}, backend={self.backend!r}, "
            f"device={self.device}{state}>"
        )

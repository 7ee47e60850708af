"""The plan: what both kinds of exchange are, once it is known which cells go where."""

from __future__ import annotations

import logging
from time import perf_counter
from typing import TYPE_CHECKING, Any

from mpishare import ranges
from mpishare.errors import ClosedError, EpochError, UnsupportedError
from mpishare.halo.apart import require_apart
from mpishare.halo.nodes import patience
from mpishare.halo.terms import settle
from mpishare.local import Local
from mpishare.messages import finish, give_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi4py import MPI

    from mpishare.halo.layout import Layout
    from mpishare.halo.message import Message
    from mpishare.halo.mover import Mover
    from mpishare.halo.terms import Terms

log = logging.getLogger("mpishare.halo")


class Plan(Local):
    """An exchange that is made many times, with the same cells and any arrays of the same layout.

    `HaloExchange` and `NeighborExchange` say which cells.
    """

    _call = "Plan"

    def __init__(
        self, comm: MPI.Intracomm, fields: Any, node: Any, require: Any, arguments: dict[str, Any]
    ) -> None:
        call = self._call
        whole, request = comm.Idup()
        with patience(node, comm, call) as (timeout_s, check):
            finish(request, call, timeout_s, whole, check=check)
        self._is_closed = True  # until it is whole
        try:
            with ranges.span(call):
                self._make(comm, whole, fields, node, require, arguments)
        except TimeoutError:
            raise
        except Exception:
            # Every rank comes here, since every rank was told.
            whole.Free()
            terms = getattr(self, "_terms", None)
            if terms is not None and terms.keeper is not None:
                terms.keeper.drop(terms.backend, terms.node)
            raise
        self._is_closed = False

    def _make(
        self,
        comm: MPI.Intracomm,
        whole: MPI.Intracomm,
        fields: Any,
        node: Any,
        require: Any,
        arguments: dict[str, Any],
    ) -> None:
        begin = perf_counter()

        def describe(layouts: Sequence[Layout]) -> dict[str, Any]:
            require_apart(fields, layouts)
            return self._describe(layouts, arguments)

        self._terms = terms = settle(comm, whole, self._call, fields, node, require, describe)
        self._sends, self._recvs = self._messages(terms)
        terms.match(self._sends, self._recvs)
        self._name, self._ground, self._own = terms.name, terms.ground, terms.fields
        self._comm = whole
        self._forth = self._mover(is_reverse=False)
        self._quick = self._forth.quick
        self._back: Mover | None = None
        self._open: list[Any] | None = None
        if terms.keeper is not None:
            terms.keeper.take(terms.backend)
        terms.ground.plans.append(self)
        terms.ground.watcher.add(self)
        ranges.bind(self, "exchange", "start", "wait", "accumulate")
        took_ms, nbytes = 1e3 * (perf_counter() - begin), self.staging_nbytes
        told = terms.node.report().told(terms.ranks.team, terms.ranks.rank, self.routes)
        log.info("%s made in %.1f ms, %d bytes of staging: %s", terms.name, took_ms, nbytes, told)

    def _describe(self, layouts: Sequence[Layout], arguments: dict[str, Any]) -> dict[str, Any]:
        """Return what all ranks are told: under ``same`` what must not differ. Local, may raise."""
        raise NotImplementedError

    def _messages(self, terms: Terms) -> tuple[list[Message], list[Message]]:
        """Return what this rank sends and receives; raises the same on all ranks."""
        raise NotImplementedError

    def _mover(self, *, is_reverse: bool) -> Mover:
        """Make what moves the cells. Collective."""
        sends, recvs = self._sends, self._recvs
        if is_reverse:
            sends, recvs = recvs, sends
        if self._terms.on_gpu:
            from mpishare.halo.cuda import CudaMover

            return CudaMover(self._terms, sends, recvs, is_reverse=is_reverse)
        from mpishare.halo.hostmover import HostMover

        return HostMover(self._terms, sends, recvs, is_reverse=is_reverse)

    @property
    def name(self) -> str:
        """The plan's, for errors and warnings: ``HaloExchange 1``."""
        return self._name

    @property
    def routes(self) -> dict[int, str]:
        """For each neighbor, by its rank in the given communicator, how its cells travel."""
        return dict(self._terms.routes[self._terms.ranks.rank])

    @property
    def staging_nbytes(self) -> int:
        """Bytes of memory that the plan takes on this rank, or on this node where it is shared."""
        return sum(mover.staging_nbytes for mover in self._movers)

    @property
    def is_closed(self) -> bool:
        """Whether the plan was closed."""
        return self._is_closed

    def exchange(self, *fields: Any, stream: Any = None) -> None:
        """Bring every ghost up to date: `start`, then `wait`.

        Collective over the plan's ranks. Stream-ordered on CUDA (a `mpi` route waits on the host);
        on the host backend it blocks until this rank's ghosts are there.

        Parameters
        ----------
        *fields : arrays
            As many as the plan was made for, each of the layout that it had then, from any
            allocator, and no array twice. Default: the arrays that the plan was made with.
        stream : stream, optional
            The stream that writes and reads the fields. Default: the current one of the library
            that the fields come from.

        Raises
        ------
        ValueError
            If the fields are others in number or layout; the message says what differs.
        EpochError
            If an exchange is open.
        PeerError, PeerTimeout
            If a rank is gone or does not come.
        ClosedError
            If the plan is closed. An interrupt that comes out of an exchange of the host leaves the
            node by that exception: neighbors may be reading.
        """
        if self._open is None and not self._is_closed and self._quick(fields or self._own, stream):
            return
        arrays = self._begin("exchange", self._forth, fields)
        self._forth.exchange(arrays, stream)

    def start(self, *fields: Any, stream: Any = None) -> None:
        """Begin an exchange: neighbors get what was put on the stream before.

        Collective over the plan's ranks. Until `wait` the owned cells may be read, and
        `HaloExchange.interior` written. Parameters and errors as `exchange`.
        """
        arrays = self._begin("start", self._forth, fields)
        self._forth.start(arrays, stream)
        self._open = arrays

    def wait(self, stream: Any = None) -> None:
        """End the exchange that `start` began: ghosts may be read, owned cells be written.

        Collective over the plan's ranks. Stream-ordered on CUDA, as `exchange`. On the host it may
        last until the neighbors are in theirs, where they read my cells in place.

        Raises
        ------
        EpochError
            Without a `start`.
        """
        self._check("wait")
        if self._open is None:
            raise EpochError(f"{self._name}: wait failed: nothing was started. Call start() first.")
        self._forth.wait(self._open, stream)
        self._open = None

    def accumulate(self, *fields: Any, stream: Any = None) -> None:
        """Add every ghost to the cell that it shadows, then set it to zero: the reverse.

        Collective over the plan's ranks; the first call makes what it needs, host-blocking. In a
        fixed order: the same ghosts give the same bits. Parameters and errors as `exchange`.

        Raises
        ------
        TypeError
            If a field's elements are no numbers.
        """
        self._check("accumulate")
        unfit = [str(each.dtype) for each in self._terms.mine if each.dtype.kind not in "iufc"]
        if unfit:
            raise TypeError(f"{self._name}: accumulate failed: {', '.join(unfit)} cannot be added")
        if self._back is None:
            self._terms.ranks.step(
                f"{self._name}: accumulate", lambda: self._first_accumulate(fields, stream)
            )
            self._back = self._mover(is_reverse=True)
        arrays = self._begin("accumulate", self._back, fields)
        self._back.exchange(arrays, stream)

    def _first_accumulate(self, fields: Sequence[Any], stream: Any) -> None:
        """Raise where the call would fail on this rank, before all ranks begin to allocate."""
        self._begin("accumulate", self._forth, fields)
        if self._forth.is_captured(fields or self._own, stream):
            raise UnsupportedError(
                f"{self._name}: accumulate failed: its first call makes what it needs, which "
                "cannot be captured into a graph. Call it once before the capture."
            )

    def close(self) -> None:
        """Close the plan on all its ranks.

        Collective over the plan's ranks, host-blocking; closing twice does nothing. What was
        started and not waited for is waited for first.

        Raises
        ------
        PeerError, PeerTimeout
            If another rank is gone: then nothing is freed.
        """
        if self._is_closed:
            return
        self._ground.agreement.check()
        if self._open is not None:
            self.wait()
        call = f"{self._name}: close"

        def each(what: str) -> None:
            for mover in self._movers:
                getattr(mover, what)()

        self._terms.ranks.step(call, lambda: each("drain"))
        self._is_closed = True
        self._forget()  # first, so that the watcher looks at nothing that goes
        # The importers first, then the owners.
        self._terms.ranks.step(call, lambda: each("release"))
        self._terms.ranks.step(call, lambda: each("close"))
        self._comm.Free()
        log.debug("%s closed", self._name)
        keeper = self._terms.keeper
        if keeper is not None:
            keeper.give(self._terms.backend, self._terms.node)

    def abandon(self) -> None:
        """Mark it closed without the other ranks. Local; frees nothing that others may use."""
        self._is_closed = True
        # Messages may still come in, and kernels still run: their memory is left to the process.
        give_up(self._forth, self._back, self._open, self._own)
        self._forget()

    def leave(self, until: float) -> None:
        """Tell the other ranks if all that was begun is over by then: this process ends. Local."""
        give_up(self)  # what is under way ends after the interpreter does
        for mover in self._movers if self._open is None else ():
            mover.leave(until)

    def lagging(self) -> list[int]:
        """Ranks of the node that have not called what this rank has. Local."""
        return sorted({rank for mover in self._movers for rank in mover.lagging()})

    def __enter__(self) -> Any:
        """Return the plan; raises if it is closed."""
        self._check("with")
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Close the plan; by an exception leave that to the node, which is told if it is ours."""
        if error is None:
            self.close()
        elif self._terms.keeper is not None:
            self._terms.node.__exit__(kind, error, trace)

    def __repr__(self) -> str:
        """Name the plan and its routes."""
        state = ", closed" if self._is_closed else ""
        return f"<mpishare.{self._name}: routes={self.routes}{state}>"

    def _begin(self, call: str, mover: Mover, fields: Sequence[Any]) -> list[Any]:
        self._check(call)
        if self._open is not None:
            raise EpochError(
                f"{self._name}: {call} failed: an exchange is open. Call wait() first."
            )
        try:
            return mover.take(fields or self._own)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{self._name}: {call} failed: {error}") from None

    @property
    def _movers(self) -> list[Mover]:
        return [mover for mover in (self._forth, self._back) if mover is not None]

    def _check(self, call: str) -> None:
        self._ground.agreement.check()
        if self._is_closed:
            raise ClosedError(f"{self._name}: {call} failed: the plan is closed")

    def _forget(self) -> None:
        self._own, self._open = [], None
        self._ground.watcher.remove(self)
        self._ground.plans.remove(self)

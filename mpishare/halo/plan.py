"""The plan: what both kinds of exchange are, once it is known which cells go where."""

from __future__ import annotations

import logging
from time import perf_counter
from typing import TYPE_CHECKING, Any

from mpishare import ranges
from mpishare.context import NotPicklable
from mpishare.coordination.mpi_agreement import finish, give_up
from mpishare.errors import ClosedError, EpochError, UnsupportedError
from mpishare.halo.node_cache import patience
from mpishare.halo.setup import agree_on_fields, agree_on_routes, require_disjoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi4py import MPI

    from mpishare.halo.engine import Engine, PlanSetup
    from mpishare.halo.layout import Layout
    from mpishare.halo.message import Message

log = logging.getLogger("mpishare.halo")


class Plan(NotPicklable):
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
            setup = getattr(self, "_setup", None)
            if setup is not None and setup.cache is not None:
                setup.cache.drop(setup.backend, setup.node)
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
            require_disjoint(fields, layouts)
            return self._describe(layouts, arguments)

        self._setup = setup = agree_on_fields(
            comm, whole, self._call, fields, node, require, describe
        )
        self._sends, self._recvs = self._messages(setup)
        agree_on_routes(setup, self._sends, self._recvs)
        self._name, self._context, self._own = setup.name, setup.context, setup.fields
        self._comm = whole
        self._forward = self._make_engine(is_reverse=False)
        self._quick = self._forward.try_fast
        self._reverse: Engine | None = None
        self._open: list[Any] | None = None
        if setup.cache is not None:
            setup.cache.take(setup.backend)
        setup.context.plans.append(self)
        setup.context.watchdog.add(self)
        ranges.bind(self, "exchange", "start", "wait", "accumulate")
        took_ms, nbytes = 1e3 * (perf_counter() - begin), self.staging_nbytes
        told = setup.node.report().told(setup.comm.ranks_here, setup.comm.rank, self.routes)
        log.info("%s made in %.1f ms, %d bytes of staging: %s", setup.name, took_ms, nbytes, told)

    def _describe(self, layouts: Sequence[Layout], arguments: dict[str, Any]) -> dict[str, Any]:
        """Return what all ranks are told: under ``same`` what must not differ. Local, may raise."""
        raise NotImplementedError

    def _messages(self, setup: PlanSetup) -> tuple[list[Message], list[Message]]:
        """Return what this rank sends and receives; raises the same on all ranks."""
        raise NotImplementedError

    def _make_engine(self, *, is_reverse: bool) -> Engine:
        """Make what moves the cells. Collective."""
        sends, recvs = self._sends, self._recvs
        if is_reverse:
            sends, recvs = recvs, sends
        if self._setup.on_gpu:
            from mpishare.halo.cuda.engine import CudaEngine

            return CudaEngine(self._setup, sends, recvs, is_reverse=is_reverse)
        from mpishare.halo.host.engine import HostEngine

        return HostEngine(self._setup, sends, recvs, is_reverse=is_reverse)

    @property
    def name(self) -> str:
        """The plan's, for errors and warnings: ``HaloExchange 1``."""
        return self._name

    @property
    def routes(self) -> dict[int, str]:
        """For each neighbor, by its rank in the given communicator, how its cells travel."""
        return dict(self._setup.routes[self._setup.comm.rank])

    @property
    def staging_nbytes(self) -> int:
        """Bytes of memory that the plan takes on this rank, or on this node where it is shared."""
        return sum(engine.staging_nbytes for engine in self._engines)

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
        arrays = self._begin("exchange", self._forward, fields)
        self._forward.exchange(arrays, stream)

    def start(self, *fields: Any, stream: Any = None) -> None:
        """Begin an exchange: neighbors get what was put on the stream before.

        Collective over the plan's ranks. Until `wait` the owned cells may be read, and
        `HaloExchange.interior` written. Parameters and errors as `exchange`.
        """
        arrays = self._begin("start", self._forward, fields)
        self._forward.start(arrays, stream)
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
        self._forward.wait(self._open, stream)
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
        unfit = [str(each.dtype) for each in self._setup.mine if each.dtype.kind not in "iufc"]
        if unfit:
            raise TypeError(f"{self._name}: accumulate failed: {', '.join(unfit)} cannot be added")
        if self._reverse is None:
            self._setup.comm.step(
                f"{self._name}: accumulate", lambda: self._first_accumulate(fields, stream)
            )
            self._reverse = self._make_engine(is_reverse=True)
        arrays = self._begin("accumulate", self._reverse, fields)
        self._reverse.exchange(arrays, stream)

    def _first_accumulate(self, fields: Sequence[Any], stream: Any) -> None:
        """Raise where the call would fail on this rank, before all ranks begin to allocate."""
        self._begin("accumulate", self._forward, fields)
        if self._forward.is_captured(fields or self._own, stream):
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
        self._context.agreement.check()
        if self._open is not None:
            self.wait()
        call = f"{self._name}: close"

        def each(what: str) -> None:
            for engine in self._engines:
                getattr(engine, what)()

        self._setup.comm.step(call, lambda: each("drain"))
        self._is_closed = True
        self._forget()  # first, so that the watchdog looks at nothing that goes
        # The importers first, then the owners.
        self._setup.comm.step(call, lambda: each("release"))
        self._setup.comm.step(call, lambda: each("close"))
        self._comm.Free()
        log.debug("%s closed", self._name)
        cache = self._setup.cache
        if cache is not None:
            cache.give(self._setup.backend, self._setup.node)

    def abandon(self) -> None:
        """Mark it closed without the other ranks. Local; frees nothing that others may use."""
        self._is_closed = True
        # Messages may still come in, and kernels still run: their memory is left to the process.
        give_up(self._forward, self._reverse, self._open, self._own)
        self._forget()

    def leave(self, until: float) -> None:
        """Tell the other ranks if all that was begun is over by then: this process ends. Local."""
        give_up(self)  # what is under way ends after the interpreter does
        for engine in self._engines if self._open is None else ():
            engine.leave(until)

    def pending(self) -> list[int]:
        """Ranks of the node that have not called what this rank has. Local."""
        return sorted({rank for engine in self._engines for rank in engine.pending()})

    def __enter__(self) -> Any:
        """Return the plan; raises if it is closed."""
        self._check("with")
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Close the plan; by an exception leave that to the node, which is told if it is ours."""
        if error is None:
            self.close()
        elif self._setup.cache is not None:
            self._setup.node.__exit__(kind, error, trace)

    def __repr__(self) -> str:
        """Name the plan and its routes."""
        state = ", closed" if self._is_closed else ""
        return f"<mpishare.{self._name}: routes={self.routes}{state}>"

    def _begin(self, call: str, engine: Engine, fields: Sequence[Any]) -> Any:
        self._check(call)
        if self._open is not None:
            raise EpochError(
                f"{self._name}: {call} failed: an exchange is open. Call wait() first."
            )
        try:
            return engine.prepare(fields or self._own)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{self._name}: {call} failed: {error}") from None

    @property
    def _engines(self) -> list[Engine]:
        return [engine for engine in (self._forward, self._reverse) if engine is not None]

    def _check(self, call: str) -> None:
        self._context.agreement.check()
        if self._is_closed:
            raise ClosedError(f"{self._name}: {call} failed: the plan is closed")

    def _forget(self) -> None:
        self._own, self._open = [], None
        self._context.watchdog.remove(self)
        self._context.plans.remove(self)

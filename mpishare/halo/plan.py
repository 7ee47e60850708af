"""The plan: an exchange that is made many times, once it is known which cells go where."""

from __future__ import annotations

import logging
from time import perf_counter
from typing import TYPE_CHECKING, Any

from mpishare import ranges
from mpishare.coordination import recording
from mpishare.errors import EpochError, UnsupportedError, format_nbytes
from mpishare.halo.base_plan import BasePlan
from mpishare.halo.made_with import MadeWith
from mpishare.halo.setup import agree_on_routes, make_engine

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from mpishare.coordination.agreement import Agreement
    from mpishare.halo.engine import Engine, PlanSetup
    from mpishare.halo.layout import FieldLayout
    from mpishare.halo.message import Message


class Plan(BasePlan):
    """An exchange that is made many times, with the same cells and any arrays of the same layout.

    `HaloExchange` and `NeighborExchange` say which cells.
    """

    _log = logging.getLogger("mpishare.halo")

    def __init__(
        self, setup: PlanSetup, sends: Sequence[Message], recvs: Sequence[Message]
    ) -> None:
        agree_on_routes(setup, sends, recvs)
        self._sends, self._recvs = sends, recvs
        self._made_with = MadeWith(setup.fields)
        setup.fields = []
        self._forward = make_engine(setup, sends, recvs, is_reverse=False)
        self._reverse: Engine | None = None
        self._open: Any = None  # the call that was started and not waited for
        self._is_open_fast = False  # then its fields alone, not what the engine prepared
        self._open_on(setup)
        ranges.bind(self, "exchange", "start", "wait", "accumulate")
        if self._log.isEnabledFor(logging.INFO):
            self._log.info(
                "%s made in %.1f ms, %s of staging: %s",
                self.name,
                1e3 * (perf_counter() - setup.begin),
                format_nbytes(self.staging_nbytes),
                setup.node.report().describe_routes(
                    setup.comm.ranks_here, setup.comm.rank, self.routes
                ),
            )

    @property
    def routes(self) -> dict[int, str]:
        """For each neighbor, by its rank in the given communicator, how its cells travel."""
        return dict(self._setup.my_routes)

    @property
    def _layouts(self) -> Sequence[FieldLayout]:
        """The layout that the plan was made for, and each call's arrays have, of every field."""
        return self._setup.mine

    @property
    def staging_nbytes(self) -> int:
        """Bytes of staging memory: those of this rank, and those that its node shares."""
        return sum(engine.staging_nbytes for engine in self._engines)

    def exchange(self, *fields: Any, stream: Any = None) -> None:
        """Bring every ghost up to date: `start`, then `wait`.

        Collective over the plan's ranks. Stream-ordered on CUDA (a `mpi` route waits on the host);
        on the host backend it blocks until this rank's ghosts are there.

        Parameters
        ----------
        *fields : arrays
            As many as the plan was made for, each of the layout that it had then, from any
            allocator, and no array twice. Default: the arrays that the plan was made with, if none
            was a `Layout`. The plan holds these until a call is given arrays, and no longer.
        stream : stream, optional
            The stream that writes and reads the fields. Default: the current one of the library
            that the fields come from.

        Raises
        ------
        ValueError
            If the fields are others in number or layout; the message says what differs.
        TypeError
            If none are given to a plan that was made for a `Layout`, or whose arrays are gone.
        EpochError
            If an exchange is open.
        PeerError, PeerTimeout
            If a rank is gone or does not come.
        ClosedError
            If the plan is closed.

        Notes
        -----
        If an exchange on the host is interrupted (Ctrl-C), this rank leaves the node, since
        neighbors may still be reading its fields.
        """
        is_free = self._open is None and not self._is_closed
        if is_free and self._forward.try_fast(fields or self._made_with.arrays(), stream):
            return
        call = self._begin("exchange", self._forward, fields)
        self._forward.exchange(call, stream)

    def start(self, *fields: Any, stream: Any = None) -> None:
        """Begin an exchange: neighbors get the cells as the stream has left them.

        Collective over the plan's ranks. Until `wait` the owned cells may be read, and
        `HaloExchange.interior` written. Parameters and errors as `exchange`.
        """
        is_free = self._open is None and not self._is_closed
        if is_free and self._forward.try_start(fields or self._made_with.arrays(), stream):
            self._open, self._is_open_fast = fields or self._made_with.arrays(), True
            return
        call = self._begin("start", self._forward, fields)
        self._forward.start(call, stream)
        self._open, self._is_open_fast = call, False
        if (captured_by := recording.current()) is not None:
            captured_by.undo.append(self._drop_open)

    def wait(self, stream: Any = None) -> None:
        """End the exchange that `start` began: ghosts may be read, owned cells be written.

        Collective over the plan's ranks. Stream-ordered on CUDA, as `exchange`. On the host it may
        last until the neighbors are in theirs, where they read my cells in place.

        Raises
        ------
        EpochError
            Without a `start`.
        """
        is_fast = self._is_open_fast and self._open is not None
        if is_fast and not self._is_closed and self._forward.try_wait(stream):
            self._open = None
            return
        self._check("wait")
        if self._open is None:
            raise EpochError(f"{self.name}: wait failed: nothing was started. Call start() first.")
        self._forward.wait(self._forward.prepare(self._open) if is_fast else self._open, stream)
        self._open = None

    def accumulate(self, *fields: Any, stream: Any = None) -> None:
        """Add every ghost to the cell that it shadows, then set it to zero: the reverse.

        Collective over the plan's ranks; the first call allocates, host-blocking. In a
        fixed order: the same ghosts give the same bits. Parameters and errors as `exchange`.

        Raises
        ------
        TypeError
            If a field's elements are no numbers.
        """
        self._check("accumulate")
        if self._reverse is None:
            self._setup.comm.step(
                f"{self.name}: accumulate", lambda: self._check_first_accumulate(fields, stream)
            )
        reverse = self._prepare_accumulate()
        call = self._begin("accumulate", reverse, fields)
        reverse.exchange(call, stream)

    def _prepare_accumulate(self) -> Engine:
        """Return the engine of the reverse; the first time, build it: collective, host-blocking."""
        unfit = [str(each.dtype) for each in self._setup.mine if each.dtype.kind not in "iufc"]
        if unfit:
            raise TypeError(f"{self.name}: accumulate failed: {', '.join(unfit)} cannot be added")
        if self._reverse is None:
            self._reverse = make_engine(self._setup, self._recvs, self._sends, is_reverse=True)
        return self._reverse

    def _check_first_accumulate(self, fields: Sequence[Any], stream: Any) -> None:
        """Raise where the call would fail on this rank, before all ranks begin to allocate."""
        self._begin("accumulate", self._forward, fields)
        if self._forward.is_captured(fields or self._made_with.arrays(), stream):
            raise UnsupportedError(
                f"{self.name}: accumulate failed: its first call allocates memory, which "
                "cannot be captured into a graph. Call it once before the capture."
            )

    def _end_call(self) -> None:
        if self._open is not None:
            self.wait()

    def _is_in_call(self) -> bool:
        return self._open is not None

    def _held(self) -> Any:
        return self._open, self._made_with.arrays()

    def _in_this_thread(self) -> AbstractContextManager[None]:
        """Let the calling thread make the calls of the block, while the node's own makes none."""
        self._context.backend.make_current()
        agreement: Agreement = self._context.agreement
        return agreement.in_this_thread()

    def _drop(self) -> None:
        self._made_with, self._open = MadeWith(()), None

    def _let_go(self) -> bool:
        self._made_with.let_go()
        return True

    def __repr__(self) -> str:
        """Name the plan and its routes."""
        return f"<mpishare.{self.name}: routes={self.routes}{self._state()}>"

    def _begin(self, call: str, engine: Engine, fields: Sequence[Any]) -> Any:
        self._check(call)
        if self._open is not None:
            raise EpochError(f"{self.name}: {call} failed: an exchange is open. Call wait() first.")
        if fields:
            self._made_with.let_go()
        fields = fields or self._made_with.arrays()
        if not fields:
            why = (
                "the arrays that the plan was made with are gone, since nobody holds them. Pass "
                "those that are there"
                if len(self._made_with)
                else "the plan was made for a Layout and has no arrays. Pass them"
            )
            raise TypeError(f"{self.name}: {call} failed: {why}: {call}(u)")
        try:
            return engine.prepare(fields)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{self.name}: {call} failed: {error}") from None

    def _drop_open(self) -> None:
        """Forget what was started in a capture that failed: it will never run."""
        self._open = None

    @property
    def _engines(self) -> list[Engine]:
        return [engine for engine in (self._forward, self._reverse) if engine is not None]

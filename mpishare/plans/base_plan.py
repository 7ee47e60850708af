"""What all plans have in common: their lives, and the calls in two halves of those with routes."""

from __future__ import annotations

import logging
import sys
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn

from mpishare.coordination import recording
from mpishare.coordination.agreement import is_agreed
from mpishare.coordination.mpi_agreement import never_free
from mpishare.errors import EpochError, MpiShareError, UnsupportedError, format_nbytes, name_ranks
from mpishare.plans import routes
from mpishare.runtime import ranges
from mpishare.runtime.context import NodeObject

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.coordination.agreement import Agreement
    from mpishare.plans.engine import PlanEngine, PlanSetup, RoutedSetup
    from mpishare.plans.exchange.pair import EnginePair


_MOST_NAMED = 8  # ranks of a route, in `repr`


class BasePlan(NodeObject):
    """A plan: agreed on once, used many times."""

    _kind = "plan"
    _closes_first = _outlives_python = True
    _ranges: tuple[str, ...]  # the calls that a profiler shows
    _log: logging.Logger
    _setup: PlanSetup
    _open: Any = None  # the call that was started, with the user's arrays
    _has_offsets = False  # on any rank: without, an exchange is linear

    def _open_on(self, setup: PlanSetup) -> None:
        """Register with the node, once the engines are made."""
        self.name, self._context, self._setup = setup.name, setup.context, setup
        setup.context.register(self, setup.comm.dropped)
        ranges.bind(self, *self._ranges)

    def _log_made(self, more: str = "") -> None:
        self._log.info(
            "%s made in %.1f ms, %s of staging%s",
            self.name,
            1e3 * (perf_counter() - self._setup.begin),
            format_nbytes(sum(engine.staging_nbytes for engine in self._engines)),
            more,
        )

    @property
    def _engines(self) -> Sequence[PlanEngine]:
        """All engines, in the order in which they are closed."""
        raise NotImplementedError

    @property
    def _setups(self) -> Sequence[PlanSetup]:
        return [self._setup]

    def _end_call(self) -> None:
        """Wait for a call that was started, before the plan closes. Collective."""

    def close(self) -> None:
        """Close the plan on all its ranks.

        Collective over the plan's ranks, host-blocking; closing twice has no effect. A call that
        was started and not waited for is completed first; a `ResourceWarning` names the plan.

        Raises
        ------
        PeerError, PeerTimeout
            If another rank is gone: then no memory is freed.
        EpochError
            If a handler of a signal calls it amid a call on the host.
        """
        if self._is_closed:
            return
        self._check("close")
        is_forgotten = self._open is not None and sys.exc_info()[0] is None
        self._end_call()
        setup, call = self._setup, f"{self.name}: close"

        def each(what: str) -> None:
            for engine in self._engines:
                getattr(engine, what)()

        agreement = setup.context.agreement
        try:
            with agreement.collective():
                setup.comm.step(call, lambda: each("drain"))
                self._is_closed = True
                self._forget()  # first: the watchdog must not read memory about to be unmapped
                # The importers first, then the owners.
                if any(engine.has_imports for engine in self._engines):
                    setup.comm.step(call, lambda: each("release"))
                setup.comm.step(call, lambda: each("close"))
            self._log.debug("%s closed", self.name)
        finally:
            # Also where a rank could not free its memory, which all ranks know then.
            if self._is_closed and agreement.life.failure is None:
                for made in self._setups:
                    made.comm.close()
        if is_forgotten:
            setup.context.warn(
                f"{self.name} was closed after start() without wait(): the call was completed. "
                "Call wait() before the fields are read or written",
                stacklevel=2,
            )

    def _abandon(self) -> None:
        self._is_closed = True
        # Messages may still arrive, and kernels still run: their memory is left to the process.
        never_free([*self._engines], self._open)
        self._forget()

    def _is_over(self) -> bool:
        return self._open is not None or all(engine.is_over() for engine in self._engines)

    def _pending(self) -> list[int]:
        return sorted({rank for engine in self._engines for rank in engine.pending()})

    def _check_elsewhere(self) -> None:
        for engine in self._engines:
            engine.check_elsewhere()

    def _late_elsewhere(self, call: str) -> Exception | None:
        found = (engine.late_elsewhere(call) for engine in self._engines)
        return next((error for error in found if error is not None), None)

    def _leave(self, error: BaseException) -> None:
        """Leave the node; of one that is kept for plans, as its own with block would."""
        kept = self._setup.context.agreement.kept
        if kept is not None:
            kept[1].__exit__(type(error), error, error.__traceback__)
        else:
            super()._leave(error)

    def _check(self, call: str) -> None:
        self._context.agreement.check()
        if self._is_closed:
            raise self._closed(f"{self.name}: {call}")

    @property
    def _needs_host(self) -> bool:
        """Whether the host is needed at every call, so that no graph can record it."""
        raise NotImplementedError

    def _in_any_thread(self, call: Callable[..., object]) -> Callable[..., None]:
        """Return a call of this plan that any thread may make."""
        agreement: Agreement = self._context.agreement
        return agreement.in_any_thread(call, self._context.backend.make_current)

    def _refused(self, call: str, why: str) -> UnsupportedError:
        return UnsupportedError(f"{self.name}: {call} failed: {why}")

    def _fail(self, call: str, error: BaseException) -> NoReturn:
        """Raise the error of a call, that of an argument by the name of the plan.

        Any that this rank alone has, such as an interrupt, leaves the node: others may have what it
        would send again.
        """
        is_of_argument = isinstance(error, (TypeError, ValueError))
        if not (is_of_argument or isinstance(error, MpiShareError) or is_agreed(error)):
            self._context.life.leave(f"{self.name}: {call}", error)
        if isinstance(error, (TypeError, ValueError)):
            raise self._named(call, error) from None
        raise error

    def _named(self, call: str, error: Exception) -> Exception:
        """Return the error of an argument with the name of the plan and the call."""
        if self._context.life.failure is not None:
            return error  # of a handler of a signal
        if type(error) in (TypeError, ValueError) and not str(error).startswith(self.name):
            return type(error)(f"{self.name}: {call} failed: {error}")
        return error

    def _forget(self) -> None:
        self._open = None
        self._context.unregister(self)


class RoutedPlan(BasePlan):
    """A plan whose engines move cells by routes."""

    _setup: RoutedSetup
    _noun: str  # for a call, in errors

    def _open_on_routes(self, setup: RoutedSetup) -> None:
        """Register with the node, once the engines are made; warn of slow routes, log all."""
        report = setup.context.report
        routes.warn(setup.name, setup.comm, report, setup.routes)
        self._open_on(setup)
        if self._log.isEnabledFor(logging.INFO):
            named = report.describe_routes(setup.comm.ranks_here, setup.comm.rank, self.routes)
            self._log_made(f": {named}")

    @property
    def routes(self) -> dict[int, str]:
        """The route of the cells from and to each rank, by its rank in the given communicator."""
        return dict[int, str](self._setup.my_routes)

    def _named_routes(self) -> str:
        """Return the routes with the ranks that they lead to, for `repr`."""
        ranks: dict[str, list[int]] = {}
        for rank, route in self.routes.items():
            ranks.setdefault(route, []).append(rank)
        named = [
            f"{route} to {name_ranks(each) if len(each) <= _MOST_NAMED else f'{len(each)} ranks'}"
            for route, each in ranks.items()
        ]
        return ", ".join(named) or "none"

    @property
    def staging_nbytes(self) -> int:
        """Bytes of staging memory, of this rank and shared by its node."""
        return sum(engine.staging_nbytes for engine in self._engines)

    @property
    def _needs_host(self) -> bool:
        return bool(self._setup.host_routes)

    def _check_free(self, call: str) -> None:
        self._check(call)
        if self._open is not None:
            raise EpochError(
                f"{self.name}: {call} failed: {self._noun} is open. Call wait() first."
            )

    def _check_started(self, opened: Any) -> None:
        """Raise unless a call that was started may be waited for now."""
        self._check("wait")
        if opened is None:
            raise EpochError(f"{self.name}: wait failed: nothing was started. Call start() first.")

    def _end_with_capture(self) -> None:
        """Forget the call that was started if its capture fails: then it will never run."""
        if (captured_by := recording.current()) is not None:
            captured_by.undo.append(self._forget_start)

    def _forget_start(self) -> None:
        self._open = None

    def _make_reverse(
        self,
        call: str,
        pair: EnginePair,
        check: Callable[[], Sequence[Any]],
        stream: Any,
        make: Callable[[], Any],
    ) -> Any:
        """Make the engine of the reverse, at its first call. Collective, host-blocking.

        `check` returns the fields of this rank's call, which are those of the pair: all ranks agree
        that these are right before any of them allocates. `make` is one of the pair's own.
        """

        def work() -> None:
            pair.require_reverse()
            if pair.forward.is_captured(check(), stream):
                raise self._refused(
                    call,
                    "its first call allocates memory, which cannot be captured into a graph. Call "
                    "it once before the capture.",
                )

        with self._context.agreement.collective():
            self._setup.comm.step(f"{self.name}: {call}", work)
            return make()

    def _end_call(self) -> None:
        if self._open is not None:
            self.wait()

    def wait(self, stream: Any = None) -> Any:
        """End what `start` began."""
        raise NotImplementedError
